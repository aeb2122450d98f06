"""Print the rows that a benchmark wrote as a Markdown table, for the README.

python bench/to_markdown.py bench/results/step.json
"""

import json
import sys
from pathlib import Path


def table(content: dict) -> str:
    """Return the table, with what it was measured on above it."""
    lines = [
        f"{content['title']}; {content['date']}, commit {content['commit']}, {content['machine']}:",
        "",
        "| case | metric | value | target | met |",
        "|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        value = f"{row['value']:.0f} {row['unit']}" if row["unit"] else f"{row['value']:.3f}"
        met = {None: "", True: "yes", False: "no"}[row["meets"]]
        lines.append(f"| {row['case']} | {row['metric']} | {value} | {row['target'] or ''} | {met} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
