"""`make bench-curves`: time and memory over learners, elements, fragments and aggregators, drawn.

    python benchmarks/curves.py [--samples N] [--threads N] [--peer-python PATH] [--json] [--record]

Each curve is a picture, `build/bench/curve-NAME.png`, time beside memory. The first three close rounds of F4
deltas as `make bench-close` does, over learners and elements beside gradientmail 0.0.2; that over fragments
closes the same 16M elements in ever more of them, one after the other. Memory is a process's peak in these
closes less what it had before the round was in it: payloads and state are counted. The last curve is that of
`make bench-takeover`: seconds a round with one, two and four aggregators over a slow store, and their memory.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import harness
import typer
from facts import where
from fleet_curve import over_aggregators
from harness import AsJson, PeerPython, Record, Samples, Scale, Threads, console, in_turns, workers
from matplotlib.figure import Figure
from peers import python_of
from rich.console import Console
from rich.table import Table
from rounds import GRADIENTMAIL, numbers

#: {side: {"seconds": [...], "megabytes": [...]}}, a number for each point of a curve.
Lines: TypeAlias = dict[str, dict[str, list[float]]]

LEARNERS = (2, 4, 8, 16, 32, 64)
MILLIONS = (1, 2, 4, 8, 16, 32)
FRAGMENTS = (1, 2, 4, 8, 16, 32)
AGGREGATORS = (1, 2, 4)
MILLION = 1_048_576


def points(
    rounds: Sequence[Mapping[str, Any]], sides: Mapping[str, tuple[Any, str]], samples: int, scale: float
) -> Lines:
    """Median seconds and peak memory of closing each of these rounds, with each side."""
    lines: Lines = {name: {"seconds": [], "megabytes": []} for name in sides}
    for given in rounds:
        with (
            numbers(given, threads=given["threads"], scale=scale) as settings,
            workers(settings, sides) as started,
        ):
            for side in started.values():
                side.ask("reset")
            seconds = in_turns(started, samples)
            for name, side in started.items():
                lines[name]["seconds"].append(statistics.median(seconds[name]))
                above = float(side.ask("peak")) - float(side.ask("before"))
                lines[name]["megabytes"].append(round(above, 1))
    return lines


def draw(path: Path, title: str, axis: str, over: Sequence[float], lines: Lines, seconds: str) -> None:
    """A picture of a curve: time on the left, memory on the right."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title)
    for place, (what, label) in enumerate((("seconds", seconds), ("megabytes", "MB"))):
        axes = figure.add_subplot(1, 2, place + 1)
        for name, line in lines.items():
            axes.plot(over, line[what], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(over, [f"{one:g}" for one in over])
        axes.set_yscale("log")
        axes.set(xlabel=axis, ylabel=label)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def measure(samples: int, threads: int, scale: float, peer: Path | str) -> dict[str, dict[str, Any]]:
    """The curves by name: what they are over, their lines, and how they are drawn."""
    own = {"deltapost": (sys.executable, "close_deltapost")}
    both = own | {"gradientmail": (peer, "close_gradientmail")}
    base = {"elements": MILLION, "tensors": 1, "learners": 8, "delta": "F4", "threads": threads}
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, title: str, axis: str, over: Sequence[float], lines: Lines, seconds: str) -> None:
        found[name] = {"title": title, "axis": axis, "over": list(over), "seconds": seconds, "lines": lines}
        console.print(f"{name}: done")

    rounds = [base | {"learners": count} for count in LEARNERS]
    lines = points(rounds, both, samples, scale)
    add("learners", "A round of 1M elements, F4", "learners", LEARNERS, lines, "seconds a close")
    rounds = [base | {"elements": millions * MILLION} for millions in MILLIONS]
    lines = points(rounds, both, samples, scale)
    add("elements", "A round of 8 learners, F4", "elements, 2²⁰", MILLIONS, lines, "seconds a close")
    rounds = [base | {"elements": 16 * MILLION // count} for count in FRAGMENTS]
    lines = points(rounds, own, samples, scale)
    one = lines["deltapost"]["seconds"]
    lines["deltapost"]["seconds"] = [count * taken for count, taken in zip(FRAGMENTS, one, strict=True)]
    add("fragments", "16M elements, 8 learners, F4", "fragments", FRAGMENTS, lines, "seconds, all fragments")
    fleet = over_aggregators(AGGREGATORS, seconds=max(5.0, 15.0 * scale))
    add(
        "aggregators",
        "8 fragments, a store 100 ms away",
        "aggregators",
        AGGREGATORS,
        fleet,
        "seconds a round",
    )
    return found


def main(
    samples: Samples = 3,
    threads: Threads = 2,
    scale: Scale = 1.0,
    peer_python: PeerPython = "",
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """Time and memory over everything that grows. Progress goes to stderr."""
    facts = where("bench-curves")
    peer = python_of(GRADIENTMAIL, python=peer_python or None, console=console)
    curves = measure(samples, threads, scale, peer)
    for name, curve in curves.items():
        path = harness.OUTPUT / f"curve-{name}.png"
        draw(path, curve["title"], curve["axis"], curve["over"], curve["lines"], curve["seconds"])
        console.print(f"drawn: {path}")
    result = facts | {"peer": GRADIENTMAIL, "threads": threads, "scale": scale, "curves": curves}
    harness.write("curves", result, record=record)
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
        return
    for curve in curves.values():
        table = Table(curve["axis"], *map(str, curve["over"]), title=curve["title"])
        for side, line in curve["lines"].items():
            table.add_row(f"{side}, {curve['seconds']}", *(f"{one:.3g}" for one in line["seconds"]))
            table.add_row(f"{side}, MB", *(f"{one:.0f}" for one in line["megabytes"]))
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
