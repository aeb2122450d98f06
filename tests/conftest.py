"""What all tests share: workers to run functions on, and a check that a test leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.cluster.launch import ForkServer
from unisono.cluster.process import children
from unisono.cluster.spawner import PRELOAD

# Tests are sent as code; what pytest's rewritten assertions and fixtures refer to is imported once, here.
TEST_PRELOAD = (*PRELOAD, "numpy", "pytest", "_pytest.assertion.rewrite")
_PATIENCE_S = 3.0


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A helper process that has imported torch once, for all tests."""
    with ForkServer(preload=TEST_PRELOAD) as server:
        yield server


@pytest.fixture
def launch(fork_server: ForkServer) -> Callable[..., list[Any]]:
    """``launch(fn, n, *args)`` calls a function on `n` real worker processes and returns what each returned."""
    return fork_server.launch


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process, thread, shared-memory entry or memory file is there that was not."""
    if "launch" in request.fixturenames:  # started before the census, it is no leak
        request.getfixturevalue("fork_server")
    before = _census()
    yield
    left = _census() - before
    deadline = time.monotonic() + _PATIENCE_S
    while left and time.monotonic() < deadline:  # what was told to end may need a moment
        threading.Event().wait(0.02)
        left = _census() - before
    assert not left, f"left behind: {', '.join(sorted(left))}"


def _census() -> set[str]:
    threads = {f"thread {thread.name}" for thread in threading.enumerate() if not _is_librarys(thread)}
    return {
        *(f"process {pid}" for pid in children(os.getpid())),
        *threads,
        *(f"/dev/shm/{name}" for name in _shared_memory()),
        *_memory_files(),
    }


def _is_librarys(thread: threading.Thread) -> bool:
    """Return whether a library keeps this thread for the whole process: pytest's timer, pools of torch."""
    return thread.name.startswith(("pytest_timeout", "pytest-timeout"))


def _shared_memory() -> list[str]:
    try:
        return os.listdir("/dev/shm")
    except OSError:  # there is none
        return []


def _memory_files() -> set[str]:
    found: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("/memfd:"):
            found.add(f"{target} (descriptor {entry.name})")
    return found
