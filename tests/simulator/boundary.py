"""Boundary: every call that leaves a simulated process passes here, takes its turns and meets its faults.

A turn before the call and one after it: between them nothing else runs, so a call is one atomic step, while a
reply may be late, lost, or never sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TypeVar

from deltapost.errors import DeltapostError
from simulator.scenario import Scenario
from simulator.scheduling import Scheduler

T = TypeVar("T")

#: Seconds a late call or reply takes: mostly shorter than a lease, at times longer than two.
DELAYS = (0.2, 1.0, 3.0, 8.0, 40.0)


class Boundary:
    """Draws the faults of single calls and counts all that struck."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, skipped: frozenset[str]) -> None:
        self._chance = Random(f"faults {scenario.seed}")
        self._scenario = scenario
        self._scheduler = scheduler
        self._skipped = skipped
        self._drawn = 0
        self.healed = False
        #: Until when an area answers nobody, and objects that fail by themselves.
        self.outages: dict[str, float] = {}
        self.failing: dict[str, float] = {}
        self.struck: Counter[str] = Counter()
        self.happened: list[str] = []

    def call(
        self, area: str, operation: str, what: str, action: Callable[[], T], error: type[DeltapostError]
    ) -> T:
        """Does `action`, or what a fault makes of it."""
        turn = self._scheduler.turn
        name = f"{area}.{operation} {what}"
        turn(name)
        if self.outages.get(area, 0.0) > self._scheduler.now:
            turn("", 0.2)
            raise error("the server does not answer")
        if self.failing.get(what, 0.0) > self._scheduler.now:
            turn("")
            raise error("this object cannot be read")
        fault = self._draw(area, operation, name)
        if fault == "refused":
            raise error("refused")
        if fault == "delayed":
            turn("", self._chance.choice(DELAYS))
        if fault == "lost":
            return self._pretended(operation)
        result = action()
        if fault == "twice":
            action()
        if fault == "reply_lost":
            turn("", 0.5)
            raise error("the reply was lost")
        turn("", self._chance.choice(DELAYS) if fault == "answered_late" else 0.0)
        return result

    def strike(self, kind: str, detail: str) -> None:
        """Notes a fault that strikes now."""
        self.struck[kind] += 1
        self.happened.append(f"turn {self._scheduler.turns}: {kind} {detail}".rstrip())

    def draw_ledger(self, operation: str, name: str) -> str:
        return self._draw("ledger", operation, name)

    def delay(self) -> float:
        return self._chance.choice(DELAYS)

    def _pretended(self, _operation: str) -> T:  # type: ignore[type-var]
        return f"{int(self._scheduler.now * 1000)}-0"  # type: ignore[return-value]

    def _draw(self, area: str, operation: str, name: str) -> str:
        kinds = [kind for kind in sorted(self._scenario.calls) if _applies(kind, area, operation)]
        if self.healed or not kinds or self._drawn >= self._scenario.budget:
            return ""
        if self._chance.random() >= self._scenario.rate:
            return ""
        kind = self._chance.choice(kinds)
        self._drawn += 1
        if f"c{self._drawn}" in self._skipped:
            return ""
        actor = self._scheduler.current
        self.strike(kind, f"(c{self._drawn}) {actor.name if actor else ''} {name}")
        return kind.partition(".")[2]


def _applies(kind: str, area: str, operation: str) -> bool:
    if not kind.startswith(f"{area}."):
        return False
    if kind in ("log.twice", "log.lost"):
        return operation == "append"
    if kind == "ledger.rolled_back":
        return operation == "write"
    return True
