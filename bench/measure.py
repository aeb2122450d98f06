"""How benchmarks measure, and how they report.

Cases are timed in blocks, in turn, forwards and backwards (A B C C B A ...), so that a machine that drifts
treats all alike. What is compared is the ratio of two cases within one round; of the ratios the median is
given with its 95 % interval, from order statistics, which assumes nothing about their distribution.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure. `meets` is None where there is no target."""

    case: str
    metric: str
    value: float
    unit: str
    target: str | None = None
    meets: bool | None = None


@dataclass(frozen=True)
class Interval:
    """A median with the 95 % interval around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(values: Sequence[float]) -> Interval:
    """Return the median of `values` and its 95 % interval; with fewer than 6 values that is all of them."""
    ordered = sorted(values)
    count = len(ordered)
    below = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return Interval(statistics.median(ordered), ordered[below], ordered[count - 1 - below])


def time_in_turn(cases: Mapping[str, Callable[[], float]], *, num_rounds: int) -> dict[str, list[float]]:
    """Return each case's times, one a round; a case is a function that returns the seconds it took.

    Each round runs all cases once forwards and once backwards and takes the mean of the two.
    """
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(num_rounds):
        total = dict.fromkeys(names, 0.0)
        for name in (*names, *reversed(names)):
            total[name] += cases[name]() / 2
        for name in names:
            times[name].append(total[name])
    return times


def ratios(times: Mapping[str, Sequence[float]], over: str, under: str) -> Interval:
    """Return ``times[over] / times[under]``, round by round."""
    return interval([a / b for a, b in zip(times[over], times[under], strict=True)])


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="a short run: shows that it works, proves nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    return parser


def report(title: str, rows: Sequence[Row], *, json_file: Path | None) -> None:
    """Print `rows` as a table and write them to a file if asked."""
    machine = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "machine": f"{_processor()}, {_num_cores()} cores",
        "python": platform.python_version(),
    }
    table = Table(title=f"{title}\n{machine['date']}, commit {machine['commit']}, {machine['machine']}")
    for heading in ("case", "metric", "value", "unit", "target", "meets"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for row in rows:
        meets = "" if row.meets is None else "yes" if row.meets else "no"
        table.add_row(row.case, row.metric, f"{row.value:.3f}", row.unit, row.target or "", meets)
    Console(width=130).print(table)
    if json_file is not None:
        json_file.write_text(
            json.dumps({"title": title, **machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


def _commit() -> str:
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return asked.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _num_cores() -> int:
    from unisono.cluster.environment import usable_cores

    return usable_cores()
