"""`make mutants`: kills every mutant and writes the table of who noticed what."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from mutants import ALL
from mutants.killing import Verdict, kill
from mutants.mutant import MAX_SEEDS, ROOT, SIMULATOR

TABLE = ROOT / "docs" / "mutants.md"
HEAD = """# Mechanisms, each taken out once

Written by `make mutants` on {date} at commit {commit} ({seconds:.0f} s). Each line is one mechanism of the
promise table (its row there), removed from a copy of the tree. *Noticed by* is the simulator, with the number
of seeds it took ({limit} at most), or the tests named in `tests/mutants/`, with the first that failed. Rows
16 and 21 have no part yet.

| row | mechanism | noticed by | after | seconds |
|---|---|---|---|---|
"""

console = Console(highlight=False, soft_wrap=True)


def line(verdict: Verdict) -> str:
    """The verdict's row of the table."""
    mutant = verdict.mutant
    if not verdict.killed:
        noticed, after = "**nobody**", verdict.words
    elif mutant.killer == SIMULATOR:
        noticed, after = f"simulator: {verdict.words[:100]}", f"{verdict.seeds} seeds"
    else:
        noticed, after = mutant.killer.split("::")[0].removeprefix("tests/"), f"`{verdict.words}`"
    cells = (str(mutant.row), mutant.name, noticed, after, f"{verdict.seconds:.0f}")
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def main(
    processes: Annotated[int, typer.Option(help="Mutants looked at side by side.")] = os.cpu_count() or 1,
    row: Annotated[int, typer.Option(help="Only this row of the promise table; 0 is all.")] = 0,
    named: Annotated[str, typer.Option(help="Only mutants with these words in their name.")] = "",
    seeds: Annotated[int, typer.Option(help="Stories that the simulator plays at most.")] = MAX_SEEDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Kills every mutant; exit 1 when one survives. The whole list also writes docs/mutants.md."""
    chosen = [one for one in ALL if (not row or one.row == row) and named in one.name]
    started, verdicts = time.monotonic(), list[Verdict]()
    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(kill, mutant, seeds) for mutant in chosen]):
            verdict = done.result()
            verdicts.append(verdict)
            if as_json:
                said = dataclasses.asdict(verdict) | {
                    "mutant": verdict.mutant.name,
                    "row": verdict.mutant.row,
                }
                print(json.dumps(said), flush=True)
            else:
                console.print(f"{len(verdicts)}/{len(chosen)} {line(verdict)}", markup=False)
                sys.stdout.flush()
    if len(chosen) == len(ALL):
        ordered = sorted(verdicts, key=lambda one: ALL.index(one.mutant))
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        head = HEAD.format(
            date=datetime.now(UTC).date(), commit=commit, limit=seeds, seconds=time.monotonic() - started
        )
        TABLE.write_text(head + "\n".join(line(one) for one in ordered) + "\n")
    survivors = [one.mutant.name for one in verdicts if not one.killed]
    if survivors and not as_json:
        console.print(f"nobody noticed: {', '.join(survivors)}", markup=False)
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    typer.run(main)
