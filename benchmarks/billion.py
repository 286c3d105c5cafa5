"""`make bench-billion`: two rounds of a run of a billion parameters, over what its parts alone predict.

    python benchmarks/billion.py [--threads N] [--scale PART] [--json] [--record]

A real Valkey, SQLite and aggregator process over a directory; twenty fragments of 50M parameters, four
learners, F4 both ways. All payloads of a round are there before its envelopes are posted; a round's time runs
until the last fragment is announced. What it predicts is measured between the rounds: the parts of one
fragment's round, each alone, times the fragments. It takes 36 bytes of disk a parameter, where the temporary
directory is, and fails first where there are fewer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import typer
from alone import Alone, totals
from announcement import AGGREGATOR
from crowd import Crowd, until
from facts import where
from harness import AsJson, Record, Row, Scale, Threads, compared, console, deliver, times
from parts import Parts, end, running

from deltapost.algorithms.diloco import DiLoCo
from deltapost.serialization.messages import SignedMessage

FRAGMENTS, LEARNERS, ROUNDS = 20, 4, 2
ELEMENTS = 50_000_000
DISK_BYTES = 36


def measure(parts: Parts, *, elements: int, threads: int) -> Row:
    """The row: seconds of both rounds together, and what is predicted."""
    config = DiLoCo.decoupled(fragments=FRAGMENTS, quorum_size=LEARNERS, grace_seconds=0.0)
    console.print(f"creating a run of {FRAGMENTS * elements:,} parameters …")
    crowd = Crowd(parts.store, parts.log, config, learners=LEARNERS, parameters=elements)
    crowd.register()
    alone = Alone(parts.store, crowd.plan, 0, threads=threads)
    process = parts.aggregator("aggregator", AGGREGATOR)
    rounds, found = [], []
    try:
        for version in range(ROUNDS):
            envelopes = [
                [crowd.upload(learner, fragment, version) for learner in crowd.learners]
                for fragment in range(FRAGMENTS)
            ]
            rounds.append(closed(crowd, envelopes, version))
            found.append(alone.measure([envelope.message for envelope in envelopes[0]]))
            console.print(
                f"round {version + 1}: {rounds[-1]:.1f} s; "
                f"the parts of one fragment alone {totals(found[-1])[0]:.2f} s"
            )
        peak = peak_megabytes(process.pid)
    finally:
        end(process)
        alone.stop()
    predicted = sum(FRAGMENTS * totals(one)[0] for one in found)
    return compared(
        {"two rounds": [round(sum(rounds), 2)], "predicted": [round(predicted, 2)]},
        times("two rounds", "predicted"),
        at_most=1.5,
    ) | {
        "rounds": [round(one, 2) for one in rounds],
        "parts_of_one_fragment": [{part: round(taken, 3) for part, taken in one.items()} for one in found],
        "aggregator_peak_megabytes": peak,
    }


def closed(crowd: Crowd, envelopes: list[list[SignedMessage]], version: int) -> float:
    """Seconds from posting a round's envelopes until every fragment is announced."""
    started = time.monotonic()
    for of_fragment in envelopes:
        for envelope in of_fragment:
            crowd.post(envelope)

    def announced() -> bool:
        for learner in crowd.learners:
            crowd.alive(learner)
        for fragment, _ in crowd.follow(1.0):
            console.print(f"round {version + 1}, fragment {fragment}: {time.monotonic() - started:.1f} s")
        return min(crowd.versions) > version

    until(announced, "the round", seconds=1_800)
    return time.monotonic() - started


def peak_megabytes(pid: int) -> float | None:
    """The most memory that a process had, as Linux tells it; None elsewhere."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [float(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return round(peaks[0] / 1e3) if peaks else None


def main(threads: Threads = 2, scale: Scale = 1.0, as_json: AsJson = False, record: Record = False) -> None:
    """How long a billion parameters take, over what their parts predict. Progress goes to stderr."""
    facts = where("bench-billion")
    elements = max(1, round(scale * ELEMENTS))
    needed, free = DISK_BYTES * FRAGMENTS * elements, shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        sys.exit(f"{tempfile.gettempdir()} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB are needed")
    with running(s3=False, postgres=False) as parts:
        row = measure(parts, elements=elements, threads=threads)
    rows = {"1B parameters, two rounds, N=4 F4, over what the parts predict": row}
    result = facts | {"threads": threads, "scale": scale, "fragments": FRAGMENTS, "rows": rows}
    deliver("billion", result, title="A billion parameters", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
