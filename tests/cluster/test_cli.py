"""The command line's checks and words. Nothing here starts a worker."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from unisono import cli
from unisono.cluster.failure import Failure, Kind
from unisono.cluster.spec import Outcome
from unisono.errors import UsageError


@pytest.fixture
def seen(monkeypatch):
    """Jobs that would have been run."""
    specs = []

    def execute(spec):
        specs.append(spec)
        return Outcome(0, None, {})

    monkeypatch.setattr(cli, "execute", execute)
    return specs


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


def run(*arguments):
    result = CliRunner().invoke(cli.app, ["run", *map(str, arguments)])
    if isinstance(result.exception, UsageError):
        raise result.exception
    return result


def test_everything_after_the_script_is_the_scripts(seen, script):
    assert run("-n", 3, script, "--fresh", "-n", "7", "--unknown=1", "x").exit_code == 0
    [spec] = seen
    assert spec.world_size == 3
    assert not spec.fresh
    assert list(spec.argv) == [str(script), "--fresh", "-n", "7", "--unknown=1", "x"]
    assert spec.path[0] == str(script.parent)


def test_only_flags_that_were_given_reach_the_script(seen, script):
    run("-n", 1, script)
    run(
        "-n", 1, "--step-timeout-s", 5, "--threads-per-worker", 2, "--backend", "gloo", "--allow-idle", script
    )
    assert [dict(spec.flags) for spec in seen] == [
        {},
        {"backend": "gloo", "step_timeout_s": 5.0, "threads_per_worker": 2, "allow_idle": True},
    ]


def test_without_a_number_there_is_a_worker_for_each_usable_core(seen, script, monkeypatch):
    monkeypatch.setattr(cli, "count_accelerators", lambda: 0)
    monkeypatch.setattr(cli, "usable_cores", lambda: 6)
    run(script)
    assert seen[0].world_size == 6


def test_accelerators_come_before_cores(seen, script, monkeypatch):
    monkeypatch.setattr(cli, "count_accelerators", lambda: 2)
    run(script)
    assert seen[0].world_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "-n 0: expected at least 1 worker"),
        (("-n", "-3"), "-n -3: expected at least 1 worker"),
        (("--grace-s", "0"), "grace_s=0.0"),
        (("--step-timeout-s", "0"), "--step-timeout-s 0.0"),
        (("--threads-per-worker", "0"), "--threads-per-worker 0"),
        (("--output-dir", "/dev/null/x"), "/dev/null/x: can't be used for output"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(seen, script, arguments, message):
    with pytest.raises(UsageError, match=message):
        run(*arguments, script)
    assert seen == []


def test_a_script_that_is_not_there_is_refused(seen, tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.py: no such file"):
        run("-n", 1, tmp_path / "nothing.py")
    with pytest.raises(UsageError, match="not a file"):
        run("-n", 1, tmp_path)


def test_an_unknown_backend_is_refused_with_the_nearest_known_one(seen, script):
    with pytest.raises(UsageError, match="'glo' is unknown; did you mean 'gloo'"):
        run("-n", 1, "--backend", "glo", script)


def test_an_unknown_option_before_the_script_is_refused(seen, script):
    result = run("--worker", "3", script)
    assert result.exit_code == 2
    assert "--worker" in result.output


def test_the_version_is_shown():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.output.startswith("unisono 0.")


def test_the_command_line_does_not_import_torch():
    code = "import sys, unisono.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_said_after_a_good_run():
    assert cli.last_words(Outcome(0, None, {0: 0, 1: 0})) == []


def test_the_last_line_says_who_failed_and_the_traceback_is_above_it():
    failure = Failure(2, 3, Kind.RAISED, "ValueError: row 17", "Traceback\nValueError: row 17\n")
    assert cli.last_words(Outcome(1, failure, {2: 1})) == [
        "unisono: traceback of rank 2:",
        "Traceback\nValueError: row 17",
        "unisono: worker 2 failed at step 3: ValueError: row 17",
    ]


def test_who_ended_early_is_named_when_only_consequences_are_known():
    failure = Failure(2, 3, Kind.CONSEQUENCE, "WorkerLostError: lost")
    lines = cli.last_words(Outcome(1, failure, {0: 0, 2: 1}, left_early=[0]))
    assert lines[0] == "unisono: ended before that without an error: worker 0"


def test_a_stopped_run_says_by_what():
    assert cli.last_words(Outcome(130, None, {}, interrupted_by="SIGINT")) == ["unisono: stopped by SIGINT"]
