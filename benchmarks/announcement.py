"""`make bench-announcement`: from a round's last envelope to its announcement, over the sum of its parts.

    python benchmarks/announcement.py [--samples N] [--threads N] [--json] [--record]

A real Valkey, SeaweedFS, Postgres and aggregator process; one fragment of 25M parameters in six tensors and
eight learners' F4 deltas. All payloads are there before the first envelope is posted, so the time holds every
download. It runs from the entry of the last envelope to that of the announcement, both by Valkey's clock. In
turns with it the parts are measured alone, over the same store with the same client: downloading, hashing
inputs and outputs, closing, uploading and reading back, which an upload is not done without.
"""

from __future__ import annotations

import sys

import typer
from alone import Alone, totals
from crowd import Crowd, until
from facts import where
from harness import AsJson, Record, Samples, Scale, Threads, compared, console, deliver, times
from parts import Parts, end, running
from rounds import LARGE

from deltapost.algorithms.diloco import DiLoCo
from deltapost.streams import position_key

AGGREGATOR = [sys.executable, "-m", "deltapost.cli.main", "aggregator"]


def measure(parts: Parts, *, samples: int, threads: int, scale: float) -> dict[str, list[float]]:
    """Seconds of each round, and of its parts alone. The first round warms up and is not counted."""
    config = DiLoCo.decoupled(
        fragments=1, in_flight=1, commit_dtype="BF16", quorum_size=LARGE["learners"], grace_seconds=0.0
    )
    crowd = Crowd(
        parts.store,
        parts.log,
        config,
        learners=LARGE["learners"],
        parameters=max(1, round(scale * LARGE["elements"])),
        tensors=LARGE["tensors"],
    )
    crowd.register()
    alone = Alone(parts.store, crowd.plan, 0, threads=threads)
    process = parts.aggregator("aggregator", AGGREGATOR)
    seconds: dict[str, list[float]] = {}
    try:
        for version in range(samples + 1):
            envelopes = [crowd.upload(learner, 0, version) for learner in crowd.learners]
            for learner in crowd.learners:
                crowd.alive(learner)
            last = [crowd.post(envelope) for envelope in envelopes][-1]
            until(lambda: crowd.follow(0.2), "the announcement", seconds=300)
            took = crowd.announced[0, version + 1] - position_key(last)[0] / 1_000
            found = alone.measure([envelope.message for envelope in envelopes])
            whole, without_reading_back = totals(found)
            console.print(f"version {version + 1}: {took:.2f} s, the parts alone {whole:.2f} s")
            for name, value in {
                "announcement": took,
                "sum of parts": whole,
                "without reading back": without_reading_back,
                **found,
            }.items():
                seconds.setdefault(name, []).append(round(value, 4))
    finally:
        end(process)
        alone.stop()
    return {name: found[1:] for name, found in seconds.items()}


def main(
    samples: Samples = 5,
    threads: Threads = 2,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """How much longer a round takes than its parts. Progress goes to stderr."""
    facts = where("bench-announcement")
    with running(s3=True, postgres=True) as parts:
        seconds = measure(parts, samples=samples, threads=threads, scale=scale)
    own = {"announcement", "sum of parts", "without reading back"}
    whole = {name: seconds[name] for name in ("announcement", "sum of parts")}
    bare = {name: seconds[name] for name in ("announcement", "without reading back")}
    name = "last envelope to announcement, 25M F4, N=8, over the sum of its parts"
    rows = {
        name: compared(whole, times("announcement", "sum of parts"), at_most=1.3, aim=1.1)
        | {"parts": {part: found for part, found in seconds.items() if part not in own}},
        "the same, the sum without reading back": compared(
            bare, times("announcement", "without reading back")
        ),
    }
    result = facts | {"threads": threads, "scale": scale, "rows": rows}
    deliver("announcement", result, title="From envelope to announcement", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
