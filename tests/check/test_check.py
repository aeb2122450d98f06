"""`unisono check` on real jobs: each planted fault is found and named, and sound scripts pass."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent / "faults"
EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(120)


def check(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "check", str(script), "-n", "1,2", *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_sound_script_is_identical() -> None:
    found = check(FAULTS / "none.py")
    assert found.stdout.startswith("identical: 4 steps on 1, 2 workers\n"), found
    assert "largest relative error" in found.stdout
    assert "remark" not in found.stdout
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("unseeded", "random numbers that don't come from the run's seed"),
        ("nondeterministic", "a non-deterministic operation"),
        ("threads", "the thread count"),
        ("iteration_order", "iteration order"),
        ("buffer", "a buffer that is changed in forward"),
        ("carried", "state is carried from one micro-batch to the next"),
        ("rank", "depends on the rank or on the world size"),
    ],
)
def test_the_cause_of_a_difference_is_named(script: str, cause: str) -> None:
    found = check(FAULTS / f"{script}.py")
    assert "likely cause: " in found.stdout, found
    assert cause in found.stdout
    assert "identical" not in found.stdout
    assert found.returncode == 1


def test_the_first_step_and_parameter_that_differ_are_named() -> None:
    found = check(FAULTS / "rank.py")
    assert "after step 0: body.0.weight" in found.stdout
    assert "between the runs with 1 worker and with 2 workers" in found.stdout


def test_an_operation_across_samples_is_remarked_on() -> None:
    found = check(FAULTS / "across_samples.py")
    assert "remark: an operation across samples" in found.stdout, found
    assert found.returncode == 0


@pytest.mark.parametrize("script", ["train_gpt.py", "train_images.py"])
def test_the_examples_are_identical(script: str) -> None:
    found = check(EXAMPLES / script, "--steps", "2")
    assert found.stdout.startswith("identical: 2 steps on 1, 2 workers\n"), found
    assert found.returncode == 0


def test_bad_requests_end_before_anything_starts(tmp_path: Path) -> None:
    for script, options, message in (
        (tmp_path / "nothing.py", [], "no such file"),
        (FAULTS / "none.py", ["-n", "0"], "expected at least 1 worker"),
        (FAULTS / "none.py", ["-n", "two"], "expected world sizes"),
        (FAULTS / "none.py", ["--steps", "0"], "expected at least 1"),
    ):
        found = check(script, *options)
        assert message in found.stderr
        assert "running" not in found.stderr
        assert found.returncode == 2


def test_the_traceback_of_a_script_that_fails_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('row 17')\n")
    found = check(script)
    assert "ValueError: row 17" in found.stdout
    assert found.returncode == 1


def test_a_script_without_steps_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("import unisono\nwith unisono.join():\n    pass\n")
    found = check(script)
    assert "did no step" in found.stderr
    assert found.returncode == 2
