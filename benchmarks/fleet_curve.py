"""Seconds a round and memory of ever more aggregators that share a run, by `make bench-takeover`'s means."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from crowd import Crowd, until
from harness import console
from load import rss
from parts import Parts, end, running
from takeover import FRAGMENTS, LEARNERS, STORE_SECONDS, Learners, evenly, owners

from deltapost.algorithms.diloco import DiLoCo, WeightedMean
from deltapost.ledger.engine import open_ledger


def over_aggregators(counts: Sequence[int], *, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds a round and resident memory in all, with each number of aggregators; each divides FRAGMENTS."""
    with running(s3=False, postgres=True) as parts:
        return {"deltapost": _measured(parts, counts, seconds)}


def _measured(parts: Parts, counts: Sequence[int], seconds: float) -> dict[str, list[float]]:
    config = DiLoCo(
        sync_every=FRAGMENTS,
        fragments=FRAGMENTS,
        in_flight=1,
        merge=WeightedMean(),
        quorum_size=LEARNERS,
        grace_seconds=0.0,
    )
    crowd = Crowd(parts.store, parts.log, config, learners=LEARNERS, parameters=1_000)
    crowd.register()
    learners, ledger = Learners(crowd), open_ledger(parts.ledger_url)
    program = [sys.executable, str(Path(__file__).with_name("slow_aggregator.py")), str(STORE_SECONDS)]
    processes: list[subprocess.Popen[bytes]] = []
    found: dict[str, list[float]] = {"seconds": [], "megabytes": []}
    try:
        for count in counts:
            while len(processes) < count:
                processes.append(parts.aggregator(f"aggregator-{len(processes)}", program))
            if count == counts[0]:
                until(lambda: len(owners(ledger)) == FRAGMENTS, "serving the run", seconds=120)
                learners.start()
            names = [f"aggregator-{number}" for number in range(count)]
            until(lambda names=names: evenly(ledger, *names), "sharing", seconds=120)
            rate = learners.rate(seconds)
            found["seconds"].append(round(60 / rate, 4))
            found["megabytes"].append(round(sum(rss(each.pid) for each in processes), 1))
            console.print(f"{count} aggregators: {rate:.0f} rounds per minute")
    finally:
        learners.stop()
        for process in processes:
            end(process)
        ledger.close()
    return found
