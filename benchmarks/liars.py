"""`make bench-liars`: what two liars of eight do to the demo's task under each merge rule.

    python benchmarks/liars.py [--rounds N] [--steps N] [--json] [--record]

A cell is a whole training run. Each is compared with one reference: the six honest learners alone, merged by
their weighted mean. A rule withstands an attack when it ends within 5 % of the reference's held-out loss.
"""

from __future__ import annotations

import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from facts import RECORDS, where
from liars_rounds import ATTACKS, HONEST, LIARS, Bench, Task
from rich.console import Console
from rich.table import Table

from deltapost.algorithms.diloco import Median, Merge, NormClipped, Rda, TrimmedMean, WeightedMean

#: Parts of the reference loss that a rule may lose and still count as withstanding an attack.
MARGIN = 0.05
NO_LIARS = "no liars"


@dataclass(frozen=True)
class Column:
    """A way to merge: a rule, with or without admission's limits."""

    name: str
    merge: Merge
    limits: bool = True


#: Columns of one group share a process, and the training that they have in common.
GROUPS: tuple[tuple[Column, ...], ...] = (
    (Column("mean, no limits", WeightedMean(), limits=False), Column("mean", WeightedMean())),
    (Column("RDA", Rda()),),
    (Column("clipped mean", NormClipped()),),
    (Column(f"trimmed mean ({LIARS})", TrimmedMean(LIARS)),),
    (Column("median", Median()),),
)
COLUMNS = tuple(column.name for group in GROUPS for column in group)
ROWS = (NO_LIARS, *ATTACKS)


def run_group(columns: tuple[Column, ...], task: Task) -> list[dict[str, Any]]:
    """All cells of these columns."""
    torch.set_num_threads(1)
    bench, cells = Bench(task), []
    for column in columns:
        for row in ROWS:
            began = time.monotonic()
            outcome = bench.run(task.algorithm(column.merge, limits=column.limits), ATTACKS.get(row))
            seconds = time.monotonic() - began
            loss = "diverged" if math.isinf(outcome.loss) else f"{outcome.loss:.3f}"
            said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(outcome.verdicts.items()))
            print(
                f"{column.name:>16} · {row:<9} {loss}  ({said}; {seconds:.0f} s)", file=sys.stderr, flush=True
            )
            cells.append(
                {
                    "rule": column.name,
                    "attack": row,
                    "loss": None if math.isinf(outcome.loss) else round(outcome.loss, 4),
                    "diverged_in_round": outcome.diverged_in,
                    "verdicts": dict(sorted(outcome.verdicts.items())),
                    "largest_honest_norm": round(outcome.largest_norm, 2),
                    "seconds": round(seconds, 1),
                }
            )
    return cells


def compare(cells: list[dict[str, Any]]) -> None:
    """Adds to each cell its loss over the reference's, as a part of it, and whether the rule withstood."""
    reference = next(one["loss"] for one in cells if one["rule"] == "mean" and one["attack"] == NO_LIARS)
    for one in cells:
        one["over_reference"] = None if one["loss"] is None else round(one["loss"] / reference - 1, 4)
        one["withstood"] = one["over_reference"] is not None and one["over_reference"] <= MARGIN


def rows_of(cells: list[dict[str, Any]]) -> list[list[str]]:
    """The table, attack by rule, as text: loss over the reference in per cent, bold where it is past 5."""
    found = {(one["attack"], one["rule"]): one for one in cells}
    table = []
    for row in ROWS:
        line = [row]
        for name in COLUMNS:
            one = found[row, name]
            over = one["over_reference"]
            text = "diverged" if over is None else f"{100 * over:+.1f} %".replace("-", "−")
            line.append(text if one["withstood"] else f"**{text}**")
        table.append(line)
    return table


def markdown(cells: list[dict[str, Any]]) -> str:
    """The table as docs/liars.md has it."""
    lines = [["attack", *COLUMNS], ["---", *["---:"] * len(COLUMNS)], *rows_of(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each cell.")] = Task.rounds,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of each round.")] = Task.steps,
    processes: Annotated[int, typer.Option(min=1, help="Processes that run cells.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    record: Annotated[bool, typer.Option("--record", help=f"Write it to {RECORDS.name}/.")] = False,
) -> None:
    """Two liars of eight against every merge rule, on the demo's task. Progress goes to stderr."""
    task, began, facts = Task(rounds=rounds, steps=steps), time.monotonic(), where("bench-liars")
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        groups = pool.map(run_group, GROUPS, [task] * len(GROUPS))
        cells = [cell for group in groups for cell in group]
    compare(cells)
    result = {
        "benchmark": "liars",
        **facts,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "honest": HONEST,
        "liars": LIARS,
        "task": asdict(task),
        "cells": cells,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if record:
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"{result['date']}-liars.json").write_text(text, encoding="utf-8")
    if as_json:
        print(text, end="")
        return
    table = Table(title=f"Held-out loss over the reference; {HONEST} honest learners, {LIARS} liars")
    for heading in ("attack", *COLUMNS):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    for line in rows_of(cells):
        table.add_row(*(f"[bold red]{cell.strip('*')}[/]" if "**" in cell else cell for cell in line))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
