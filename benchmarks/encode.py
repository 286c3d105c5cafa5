"""`make bench-encode`: encoding 50M parameters with error feedback, beside the same in torch, and the limit.

    python benchmarks/encode.py [--samples N] [--threads N] [--json] [--record]

Both sides make codes and scales of values plus residual, and leave what the codes lose as the next residual.
They are first asked for a hash of scales and residual: without the same bytes there is no comparison.
STREAM's triad takes turns with them. The limit counts values and residual read, residual and codes written.
"""

from __future__ import annotations

import sys
import tempfile

import typer
from bandwidth import TRIAD_ELEMENTS, Limit, encode_bytes
from facts import where
from harness import AsJson, Record, Samples, Scale, Threads

from harness import compared, console, deliver, in_turns, over_limit, times, workers  # isort: skip

ELEMENTS = 50_000_000
#: Each row's format and what its ratio has to reach at least. Both aim at twice the limit.
ROWS = {"F8_E4M3": 12.0, "F4": 30.0}
LIMIT_AIM = 2.0


def main(
    samples: Samples = 5,
    threads: Threads = 2,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """How long an encode takes, beside torch and the memory's limit. Progress goes to stderr."""
    facts = where("bench-encode")
    rows = {}
    sides = {
        "deltapost": (sys.executable, "encode_deltapost"),
        "torch": (sys.executable, "encode_torch"),
        "triad": (sys.executable, "triad"),
    }
    elements = max(32, round(scale * ELEMENTS) // 32 * 32)
    triad_elements = round(scale * TRIAD_ELEMENTS)
    for delta, least in ROWS.items():
        with tempfile.TemporaryDirectory(prefix="deltapost-bench-") as directory:
            given = {"elements": elements, "delta": delta, "threads": threads}
            given |= {"triad_elements": triad_elements, "directory": directory}
            with workers(given, sides) as started:
                if started["deltapost"].ask("digest") != started["torch"].ask("digest"):
                    sys.exit(f"{delta}: the two sides give different bytes, so their times say nothing")
                seconds = in_turns(started, samples)
                how = started["triad"].ask("how")
        name = f"encode {delta} with residual, 50M"
        row = compared(seconds, times("torch", "deltapost"), at_least=least)
        limit = Limit(encode_bytes(elements, delta), triad_elements)
        rows[name] = row
        rows[f"{name}, over the limit of bandwidth"] = over_limit(seconds, limit, "deltapost", aim=LIMIT_AIM)
        console.print(f"{name}: {row['ratio']} times")
    result = facts | {"triad": how, "threads": threads, "scale": scale, "rows": rows}
    deliver("encode", result, title="Encoding with error feedback", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
