"""`make bench-close`: how long deltapost takes to close a round, beside gradientmail 0.0.2.

    python benchmarks/close.py [--samples N] [--threads N] [--peer-python PATH] [--json] [--record]

Both sides hold the same round's payloads in memory, each in a process of its own, and take turns; every
sample is one whole `close_round` with its checks. A ratio is of the medians.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from facts import where
from harness import (
    AsJson,
    PeerPython,
    Record,
    Samples,
    Scale,
    Threads,
    compared,
    console,
    deliver,
    in_turns,
    times,
    workers,
)
from peers import python_of
from rounds import GRADIENTMAIL, LARGE, numbers

#: Each row's round, what its ratio has to reach at least, and the aim.
ROWS: dict[str, tuple[dict[str, Any], float, float]] = {
    "close F4, 25M in 6, N=8": (LARGE | {"delta": "F4"}, 15.0, 25.0),
    "close F8_E4M3, 25M in 6, N=8": (LARGE | {"delta": "F8_E4M3"}, 7.0, 12.0),
    "close BF16, 25M in 6, N=8": (LARGE | {"delta": "BF16"}, 5.0, 9.0),
    "close F32, 25M in 6, N=8": (LARGE | {"delta": "F32"}, 4.0, 6.0),
    "close F4, 4M, N=64": (LARGE | {"delta": "F4", "tensors": 1, "learners": 64}, 45.0, 80.0),
    "close F4, 384 of 16K, N=8": (LARGE | {"delta": "F4", "tensors": 384, "elements": 16_384}, 12.0, 20.0),
}


def main(
    samples: Samples = 5,
    threads: Threads = 2,
    scale: Scale = 1.0,
    peer_python: PeerPython = "",
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """How long a round takes to close, beside gradientmail. Progress goes to stderr."""
    facts = where("bench-close")
    peer = python_of(GRADIENTMAIL, python=peer_python or None, console=console)
    rows = {}
    for name, (given, least, aim) in ROWS.items():
        sides = {
            "deltapost": (sys.executable, "close_deltapost"),
            "gradientmail": (peer, "close_gradientmail"),
        }
        with numbers(given, threads=threads, scale=scale) as settings, workers(settings, sides) as started:
            seconds = in_turns(started, samples)
        rows[name] = compared(seconds, times("gradientmail", "deltapost"), at_least=least, aim=aim)
        console.print(f"{name}: {rows[name]['ratio']} times")
    result = facts | {"peer": GRADIENTMAIL, "threads": threads, "scale": scale, "rows": rows}
    deliver("close", result, title="Closing a round", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
