"""`make bench-files`: a round closed from verified payload files, beside gradientmail 0.0.2.

    python benchmarks/files.py [--samples N] [--threads N] [--peer-python PATH] [--json] [--record]

What `make bench-close` measures, and before it what an aggregator does with payloads that it has as files:
hash them, compare, read them. Both sides do so in as many threads as they close with; the files were just
written, so they come from the page cache.
"""

from __future__ import annotations

import sys

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

#: Each row's format of deltas, what its ratio has to reach at least, and the aim.
ROWS = {"F4": (10.0, 15.0), "F32": (2.0, 3.0)}


def main(
    samples: Samples = 5,
    threads: Threads = 2,
    scale: Scale = 1.0,
    peer_python: PeerPython = "",
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """How long a round takes to close from files, beside gradientmail. Progress goes to stderr."""
    facts = where("bench-files")
    peer = python_of(GRADIENTMAIL, python=peer_python or None, console=console)
    rows = {}
    for delta, (least, aim) in ROWS.items():
        name = f"close {delta}, 25M in 6, N=8, from verified files"
        sides = {
            "deltapost": (sys.executable, "files_deltapost"),
            "gradientmail": (peer, "files_gradientmail"),
        }
        given = LARGE | {"delta": delta}
        with numbers(given, threads=threads, scale=scale) as settings, workers(settings, sides) as started:
            seconds = in_turns(started, samples)
        rows[name] = compared(seconds, times("gradientmail", "deltapost"), at_least=least, aim=aim)
        console.print(f"{name}: {rows[name]['ratio']} times")
    result = facts | {"peer": GRADIENTMAIL, "threads": threads, "scale": scale, "rows": rows}
    deliver("files", result, title="Closing a round from files", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
