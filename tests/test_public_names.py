from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from unisono import errors

PUBLIC = {
    "DeadlineError",
    "JobError",
    "LoaderError",
    "MismatchError",
    "PackedList",
    "Replica",
    "Run",
    "StepFailedError",
    "Synchronous",
    "TransportError",
    "UnisonoError",
    "UsageError",
    "WorkerLostError",
    "fingerprint",
    "join",
    "launch",
}


def test_the_public_names_are_these() -> None:
    assert set(unisono.__all__) == PUBLIC
    assert list(unisono.__all__) == sorted(unisono.__all__)
    assert set(dir(unisono)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(unisono, name)
    assert found.__name__ == name
    assert found.__doc__


def test_no_public_name_is_that_of_a_file_which_would_hide_it_once_imported() -> None:
    files = {path.stem for path in Path(unisono.__file__).parent.iterdir()}
    assert not files & PUBLIC


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        unisono.nothing  # noqa: B018


def test_every_error_that_users_may_catch_is_public() -> None:
    leaves = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert leaves <= PUBLIC


def test_type_checkers_see_the_names_that_exist_at_run_time() -> None:
    tree = ast.parse(Path(unisono.__file__).read_text(encoding="utf-8"))
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    imported = {
        alias.name
        for block in guarded
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == PUBLIC


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, unisono; unisono.UsageError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_error_of_usage_is_a_value_error_and_a_deadline_a_timeout() -> None:
    assert issubclass(unisono.UsageError, ValueError)
    assert issubclass(unisono.DeadlineError, TimeoutError)
    assert issubclass(unisono.WorkerLostError, unisono.TransportError)
    assert all(issubclass(getattr(unisono, name), unisono.UnisonoError) for name in PUBLIC if "Error" in name)
