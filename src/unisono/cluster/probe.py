"""Questions about torch that the launcher asks a short-lived interpreter, so as not to import torch itself.

Run as ``python -m unisono.cluster.probe accelerators`` or ``... backend NAME``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unisono.cluster.process import python_command
from unisono.errors import UsageError

_BUILT_IN_BACKENDS = ("gloo", "shared_memory")
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel*", "dri/renderD*", "davinci[0-9]*")
_TIMEOUT_S = 120.0


def count_accelerators(devices: Path = Path("/dev")) -> int:
    """Return how many accelerators torch can use here. Starts no interpreter when no device file hints at any."""
    if not any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES):
        return 0
    answer = _ask("accelerators")
    return int(answer.stdout) if answer.returncode == 0 else 0


def check_backend(name: str) -> None:
    """Raise a `UsageError` unless torch knows the backend. At once for those of CPUs, else after importing torch."""
    if name in _BUILT_IN_BACKENDS:
        return
    answer = _ask("backend", name)
    if answer.returncode != 0:
        raise UsageError(
            answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else f"backend {name!r}"
        )


def _ask(*question: str) -> subprocess.CompletedProcess[str]:
    command = python_command("unisono.cluster.probe", *question)
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def main(arguments: list[str]) -> int:
    """Answer one question on standard output; a refusal goes to standard error."""
    if arguments[0] == "accelerators":
        import torch

        print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
        return 0
    from unisono.transport.backends import check_backend as check

    try:
        check(arguments[1])
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
