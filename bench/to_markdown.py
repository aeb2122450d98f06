"""Print the rows that a benchmark wrote as a Markdown table, for the README and docs/benchmarks.md.

python bench/to_markdown.py [--ratios] bench/results/step.json
"""

import json
import sys
from pathlib import Path


def table(content: dict, *, only_ratios: bool) -> str:
    """Return the table, with what it was measured on above it."""
    lines = [
        f"{content['title']}; {content['date']}, commit {content['commit']}, {content['machine']}:",
        "",
        "| case | metric | value | target | met |",
        "|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        if row["unit"] and only_ratios:
            continue
        value = f"{_short(row['value'])} {row['unit']}" if row["unit"] else f"{row['value']:.3f}"
        met = {None: "", True: "yes", False: "no"}[row["meets"]]
        lines.append(f"| {row['case']} | {row['metric']} | {value} | {row['target'] or ''} | {met} |")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    *options, file = sys.argv[1:]
    print(table(json.loads(Path(file).read_text()), only_ratios="--ratios" in options))
