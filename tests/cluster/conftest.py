"""Scripts on real workers, without paying for a launcher's start each time."""

from __future__ import annotations

import io
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from unisono import cli
from unisono.cluster.launch import ForkServer
from unisono.cluster.script import script_job
from unisono.cluster.spec import Outcome


@dataclass(frozen=True)
class Ran:
    """A job that ended, as its user sees it."""

    outcome: Outcome
    out: str
    err: str
    last_words: str
    seconds: float


@pytest.fixture
def run_script(fork_server: ForkServer, tmp_path: Path) -> Callable[..., Ran]:
    """``run_script(source, n, *args, **options)`` runs a script as ``unisono run`` does."""

    def run(source: str, n: int, *args: str, **options: object) -> Ran:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        out, err = io.StringIO(), io.StringIO()
        options = {"output_directory": tmp_path / "logs"} | options
        start = time.monotonic()
        outcome = fork_server.run(script_job(script, args, world_size=n, **options), out=out, err=err)
        seconds = time.monotonic() - start
        last_words = "\n".join(cli.last_words(outcome))
        return Ran(outcome, out.getvalue(), err.getvalue(), last_words, seconds)

    return run
