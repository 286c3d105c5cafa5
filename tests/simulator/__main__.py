"""`make sim`: plays many seeds on all cores and tells which fail, and which faults never struck."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deltapost.points import END_POINTS, POINTS
from simulator.running import Outcome, run_seed
from simulator.scenario import AT_POINTS, BY_CALL, HOSTILE, PLANNED
from simulator.shrinking import shrink

#: Seconds spent on a shorter story of a failing seed.
SHRINK_SECONDS = 60.0
#: Failing seeds that are told in full.
MAX_TOLD = 3
COMMAND = "PYTHONPATH=tests .venv/bin/python -m simulator"

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Coverage:
    """How often each fault struck and each point was reached, over all seeds."""

    struck: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    rounds: int = 0

    def add(self, outcome: Outcome) -> None:
        self.struck += outcome.struck
        self.reached += outcome.reached
        self.turns += outcome.turns
        self.rounds += outcome.rounds

    def holes(self) -> list[str]:
        """Faults that never struck and points that nobody reached."""
        faults = [*BY_CALL, *PLANNED, *(f"hostile.{kind}" for kind in HOSTILE)]
        faults += [f"{kind}@{point}" for kind in AT_POINTS for point in (*POINTS, *END_POINTS)]
        return [name for name in faults if not self.struck[name]] + [
            f"{point} is never reached" for point in (*POINTS, *END_POINTS) if not self.reached[point]
        ]

    def show(self) -> None:
        table = Table("fault", "struck", title="Faults", title_justify="left")
        for name in [*BY_CALL, *PLANNED, *(f"hostile.{kind}" for kind in HOSTILE)]:
            table.add_row(name, str(self.struck[name]))
        console.print(table)
        table = Table("point", "reached", *AT_POINTS, title="Points", title_justify="left")
        for point in (*POINTS, *END_POINTS):
            struck = (str(self.struck[f"{kind}@{point}"]) for kind in AT_POINTS)
            table.add_row(point, str(self.reached[point]), *struck)
        console.print(table)


def play(seeds: range, processes: int) -> Iterator[Outcome]:
    """The outcomes of all seeds, as they come."""
    with ProcessPoolExecutor(processes) as pool:
        waiting = [pool.submit(run_seed, seed) for seed in seeds]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tell(outcome: Outcome, seconds: float) -> None:
    """A failing seed: its command and the shortest story that was found of it."""
    console.print(f"\n[bold red]seed {outcome.seed}[/]: {outcome.failure}", markup=True)
    short, skipped = shrink(outcome, seconds=seconds, tell=lambda line: console.print(f"  {line}"))
    again = run_seed(outcome.seed, skipped=skipped, log_events=True)
    console.print("faults that struck:")
    for line in again.happened:
        console.print(f"  {line}", markup=False)
    console.print("the last turns:")
    for line in again.trace[-60:]:
        console.print(f"  {line}", markup=False)
    without = f" --without {','.join(sorted(skipped))}" if skipped else ""
    console.print(f"[bold]{short.failure}[/]", markup=True)
    console.print(f"reproduce: make sim SEEDS=1 FIRST_SEED={outcome.seed}", markup=False)
    console.print(f"the shortest: {COMMAND} --seeds 1 --first-seed {outcome.seed}{without}", markup=False)


def main(
    seeds: Annotated[int, typer.Option(help="How many seeds are played.")] = 1000,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    processes: Annotated[int, typer.Option(help="Processes that play.")] = os.cpu_count() or 1,
    without: Annotated[str, typer.Option(help="Faults left out of one seed, as it told them: c3,p1.")] = "",
    stop: Annotated[bool, typer.Option(help="Stop at the first seed that fails.")] = False,
    coverage: Annotated[bool, typer.Option(help="Show how often each fault struck.")] = True,
) -> None:
    """Plays seeds of the simulator; exit 1 when one fails."""
    if without:
        outcome = run_seed(first_seed, skipped=frozenset(without.split(",")), log_events=True)
        for line in (*outcome.happened, *outcome.trace, f"seed {first_seed}: {outcome.failure or 'holds'}"):
            console.print(line, markup=False)
        raise typer.Exit(1 if outcome.failure else 0)
    started, covered, failed = time.monotonic(), Coverage(), list[Outcome]()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=seeds)
        for outcome in play(range(first_seed, first_seed + seeds), processes):
            covered.add(outcome)
            progress.advance(task)
            if outcome.failure:
                failed.append(outcome)
                progress.console.print(f"seed {outcome.seed}: {outcome.failure}", markup=False)
                if stop:
                    break
    if coverage:
        covered.show()
        for hole in covered.holes():
            console.print(f"never: {hole}", markup=False)
    for outcome in failed[:MAX_TOLD]:
        tell(outcome, SHRINK_SECONDS)
    console.print(
        f"{seeds} seeds from {first_seed}: {len(failed)} failed, {covered.rounds} rounds, "
        f"{covered.turns} turns, {time.monotonic() - started:.0f} s"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
