"""Running seeds: one, with its outcome; again with fewer faults, until the shortest story is left."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from simulator.scenario import Scenario
from simulator.world import World

#: Where SQLite and journals need no disk, if the machine has such a place.
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Outcome:
    """What became of one seed."""

    seed: int
    failure: str | None
    turns: int
    rounds: int
    seconds: float
    struck: Counter[str]
    reached: Counter[str]
    happened: list[str] = field(repr=False)
    trace: list[str] = field(repr=False)


def run_seed(seed: int, *, skipped: frozenset[str] = frozenset(), log_events: bool = False) -> Outcome:
    """Plays a seed, without the `skipped` faults."""
    scenario = Scenario.of(seed)
    started = time.perf_counter()
    before = logging.root.manager.disable
    if not log_events:
        logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
            world = World(scenario, Path(directory), skipped=skipped)
            failure = world.run()
    finally:
        logging.disable(before)
    return Outcome(
        seed=seed,
        failure=failure,
        turns=world.scheduler.turns,
        rounds=sum(len(chain) for chain in world.history.records),
        seconds=time.perf_counter() - started,
        struck=world.boundary.struck,
        reached=world.reached,
        happened=world.boundary.happened,
        trace=list(world.trace),
    )
