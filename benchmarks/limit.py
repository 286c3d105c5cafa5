"""`make bench-limit`: a close's time over the time that its bytes take to pass through memory once.

    python benchmarks/limit.py [--samples N] [--threads N] [--json] [--record]

The closes of `make bench-close`, in turns with STREAM's triad in as many threads. The limit counts each byte
of the payloads once, anchor, momentum and master read and written, and the update written; a close that
reads the payloads twice, or whose arithmetic takes longer than the memory, is that many times above it.
"""

from __future__ import annotations

import sys

import typer
from bandwidth import TRIAD_ELEMENTS, Limit, close_bytes
from facts import where
from harness import AsJson, Record, Samples, Scale, Threads, console, deliver, in_turns, over_limit, workers
from rounds import LARGE, numbers

#: Each row's format of deltas, and how many times the limit a close may take. All aim at three times.
ROWS = {"F4": 5.0, "F8_E4M3": 5.0, "BF16": 4.0, "F32": 4.0}
AIM = 3.0


def main(
    samples: Samples = 7,
    threads: Threads = 2,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """How far a close is from what memory allows. Progress goes to stderr."""
    facts = where("bench-limit")
    rows = {}
    sides = {"close": (sys.executable, "close_deltapost"), "triad": (sys.executable, "triad")}
    for delta, most in ROWS.items():
        given = LARGE | {"delta": delta, "triad_elements": round(scale * TRIAD_ELEMENTS)}
        with numbers(given, threads=threads, scale=scale) as settings, workers(settings, sides) as started:
            seconds = in_turns(started, samples)
            how = started["triad"].ask("how")
        elements = settings["elements"] * settings["tensors"]
        touched = close_bytes(elements, settings["learners"], delta, settings["commit"])
        row = over_limit(seconds, Limit(touched, settings["triad_elements"]), "close", at_most=most, aim=AIM)
        rows[f"close {delta}, 25M in 6, N=8, over the limit of bandwidth"] = row
        console.print(f"{delta}: {row['ratio']} times the limit; the triad {row['triad_gb_per_second']} GB/s")
    result = facts | {"triad": how, "threads": threads, "scale": scale, "rows": rows}
    deliver("limit", result, title="A close over the bandwidth limit", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
