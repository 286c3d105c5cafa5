"""SealPolicy: *when* a round is sealed, from counts, liveness and this process's own clock.

*Who* is in it is not decided here: that is the fold over the stream (`algorithms.sealing`). So any other
policy that seals at the same positions leads to the same records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deltapost.algorithms.schedule import RoundTimes, Schedule
from deltapost.algorithms.sealing import OpenRound, Ready, Waiting, readiness
from deltapost.ledger import intake as ledger_intake
from deltapost.limits import MAX_GRACE_SECONDS
from deltapost_aggregator.context import RunContext


@dataclass
class Stages:
    """Seconds that the stages of a round took, as far as this process saw them."""

    quorum: float | None = None
    grace: float | None = None
    close: float | None = None
    sync: float | None = None


class Policy(Protocol):
    """What a worker asks about the open round. `position` is where the stream was read to."""

    def begin(self, head: int) -> None:
        """The round with base `head` is open, if it was not before."""

    def ready(self, view: OpenRound, position: str, /) -> Ready | Waiting:
        """Whether to seal now."""

    def full(self, view: OpenRound, position: str, /) -> bool:
        """Whether the entries after this one belong to the next round."""

    def stages(self, head: int) -> Stages:
        """How long the round took to its quorum and to its seal."""

    def committed(self, step_seconds: float, stages: Stages) -> None:
        """A round was committed by this process: its times go into the averages."""


class SealPolicy:
    """Quorum, grace, liveness, passes, degraded rounds: design.md, "Ready to seal", "Grace", "Degraded"."""

    def __init__(self, context: RunContext, fragment: int) -> None:
        self._context = context
        self._fragment = fragment
        self._monotonic = context.services.monotonic
        config = context.plan.config
        self._schedule = Schedule(config.sync_every, config.fragments, config.in_flight, config.overlap_steps)
        self._times = RoundTimes()
        self._started: tuple[int, float] | None = None
        self._quorum_at: tuple[int, float] | None = None
        #: Since when all who are missing have had no publication left, and when that was looked at.
        self._held_since: float | None = None
        self._held_looked_at = float("-inf")
        self._held: frozenset[str] = frozenset()

    def begin(self, head: int) -> None:
        if self._started is None or self._started[0] != head:
            self._started = (head, self._monotonic())

    def ready(self, view: OpenRound, _position: str, /) -> Ready | Waiting:
        now, newcomers = self._monotonic(), self._newcomers(view)
        if len(view.slots) - len(newcomers) < self._context.plan.config.quorum_size:
            self._quorum_at = None
        elif self._quorum_at is None or self._quorum_at[0] != view.head:
            self._quorum_at = (view.head, now)
        since_quorum = now - self._quorum_at[1] if self._quorum_at else None
        live = self._context.live()
        found = self._readiness(view, newcomers, since_quorum, live)
        if isinstance(found, Ready) or not live:
            self._held_since = None
            return found
        held = self._held_elsewhere(view, live)
        return self._readiness(view, newcomers, since_quorum, live - held) if held else found

    def full(self, view: OpenRound, _position: str, /) -> bool:
        # Asked after every entry: what mostly says no is cheap, however many learners there are.
        if len(view.slots) < self._context.plan.config.quorum_size:
            return False
        if self._grace_seconds() > 0 and self._awaits_somebody(view):
            return False
        ready = self._readiness(view, self._newcomers(view), 0.0, self._context.live())
        return isinstance(ready, Ready) and not ready.degraded

    def stages(self, head: int) -> Stages:
        now = self._monotonic()
        started = self._started[1] if self._started else now
        if self._quorum_at is None or self._quorum_at[0] != head:
            return Stages(quorum=now - started)
        return Stages(quorum=max(0.0, self._quorum_at[1] - started), grace=now - self._quorum_at[1])

    def committed(self, step_seconds: float, stages: Stages) -> None:
        self._times = self._times.observed(step=step_seconds, quorum=stages.quorum, sync=stages.sync)

    def _awaits_somebody(self, view: OpenRound) -> bool:
        """Whether a live learner has neither contributed nor passed, or it is not known who is live."""
        live = self._context.live()
        missing = None if live is None else live - view.slots.keys()
        return missing is None or bool(missing and missing - self._context.passed(self._fragment, view.head))

    def _newcomers(self, view: OpenRound) -> set[str]:
        return {learner for learner in view.slots if not self._context.counts(learner, view.head)}

    def _held_elsewhere(self, view: OpenRound, live: frozenset[str]) -> frozenset[str]:
        """Who cannot come: everyone that is missing has all `in_flight` publications out in other rounds.

        Out of phase, such learners hold each other's rounds open for ever. After a lease of that the round
        does not wait for them.
        """
        config, now = self._context.plan.config, self._monotonic()
        seconds = self._context.services.settings.learner_lease_seconds
        missing = live - view.slots.keys() - self._context.passed(self._fragment, view.head)
        if config.in_flight >= config.fragments or not view.slots or not missing:
            self._held_since = None
            return frozenset()
        if now - self._held_looked_at >= seconds / 10:
            self._held_looked_at = now
            out = ledger_intake.outstanding(self._context.services.ledger, self._context.run, self._fragment)
            self._held = frozenset(name for name, count in out.items() if count >= config.in_flight)
        if not missing <= self._held:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        long = self._held_since is not None and now - self._held_since >= seconds
        return missing if long else frozenset()

    def _readiness(
        self,
        view: OpenRound,
        newcomers: set[str],
        seconds_since_quorum: float | None,
        live: frozenset[str] | None,
    ) -> Ready | Waiting:
        return readiness(
            accepted=view.slots,
            newcomers=newcomers,
            passed=self._context.passed(self._fragment, view.head),
            live=live,
            config=self._context.plan.config,
            seconds_since_quorum=seconds_since_quorum,
            grace_seconds=self._grace_seconds(),
        )

    def _grace_seconds(self) -> float:
        """How long the open round waits past its quorum: the manifest's fixed window, or the adaptive one."""
        fixed = self._context.plan.config.grace_seconds
        adaptive = min(self._schedule.grace_seconds(self._times), MAX_GRACE_SECONDS)
        return adaptive if fixed is None else fixed
