"""`make bench-mean`: a weighted mean of eight learners' float32 deltas, beside Flower's `aggregate`.

    python benchmarks/mean.py [--samples N] [--threads N] [--peer-python PATH] [--json] [--record]

Flower's side is `flwr.server.strategy.aggregate.aggregate` over numpy arrays that are there already: the mean
and nothing more. deltapost's side is what a user gets who asks for the same, a whole `close_round` with
`WeightedMean`: the checks, every norm, the mean, the cosines that the record names and the outer step. The
second row is the sweep that merges alone; it still sums what cosines need of each block.
"""

from __future__ import annotations

import sys

import typer
from facts import where
from harness import AsJson, PeerPython, Record, Samples, Scale, Threads

from harness import compared, console, deliver, in_turns, times, workers  # isort: skip
from peers import python_of
from rounds import LARGE, numbers

FLOWER = "flwr==1.42.0"


def main(
    samples: Samples = 5,
    threads: Threads = 2,
    scale: Scale = 1.0,
    peer_python: PeerPython = "",
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """How long a weighted mean takes, beside Flower. Progress goes to stderr."""
    facts = where("bench-mean")
    peer = python_of(FLOWER, python=peer_python or None, console=console)
    given = LARGE | {"delta": "F32", "merge": "mean", "commit": None}
    sides = {
        "whole close": (sys.executable, "close_deltapost"),
        "merge alone": (sys.executable, "mean_deltapost"),
        "flower": (peer, "mean_flower"),
    }
    with numbers(given, threads=threads, scale=scale) as settings, workers(settings, sides) as started:
        seconds = in_turns(started, samples)
    rows = {
        "weighted mean F32, 25M in 6, N=8": compared(seconds, times("flower", "whole close"), at_least=5.0),
        "the same, the merging sweep alone": compared(seconds, times("flower", "merge alone")),
    }
    result = facts | {"peer": FLOWER, "threads": threads, "scale": scale, "rows": rows}
    deliver("mean", result, title="A weighted mean", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
