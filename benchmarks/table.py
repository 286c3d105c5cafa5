"""README's table of what was measured, from the newest record of each benchmark.

    python benchmarks/table.py [--write]

Prints the table; `--write` puts it into README.md, between the two comments that mark it. A test holds README
to what the newest records say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from every import BENCHMARKS, LONG
from facts import RECORDS
from harness import wanted

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- the table: make bench-table -->", "<!-- end of the table -->"


def newest(name: str) -> tuple[Path, dict[str, Any]] | None:
    """The newest record of a benchmark: dates sort as words do. None where nobody kept one."""
    found = max(RECORDS.glob(f"[0-9]*-{name}.json"), default=None)
    return None if found is None else (found, json.loads(found.read_text(encoding="utf-8")))


def markdown() -> str:
    """The table: a row for each row of each record."""
    lines = ["| what | measured | at least ≥, at most ≤ (aim) | command, record |", "|---|---|---|---|"]
    for name in BENCHMARKS + LONG:
        kept = newest(name)
        if kept is None:
            continue
        path, record = kept
        link = f"`make bench-{name}`, [{record['date']}](benchmarks/records/{path.name})"
        for title, row in record["rows"].items():
            lines.append(f"| {title} | {measured(row)} | {wanted(row)} | {link} |")
    return "\n".join(lines)


def measured(row: dict[str, Any]) -> str:
    """The ratio, and the medians that it is of."""
    unit = row.get("unit", "s")
    sides = ", ".join(f"{side} {median:.3g} {unit}" for side, median in row["medians"].items())
    return f"**{row['ratio']:g}×** ({sides})"


def main(write: Annotated[bool, typer.Option("--write", help="Put it into README.md.")] = False) -> None:
    """The table of the newest records."""
    if not write:
        print(markdown())
        return
    text = README.read_text(encoding="utf-8")
    marked = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    README.write_text(marked.sub(lambda _: f"{BEGIN}\n{markdown()}\n{END}", text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
