"""Which learners are live: a fold over their messages and the seconds that their stream was readable.

The lease clock advances only by `listened(seconds)`, so an outage of the stream, or of the aggregator
itself, expires nobody. No clock of a learner's machine is ever used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deltapost.serialization.messages import AliveMessage, LeaveMessage, MemberMessage, PassMessage


@dataclass
class _Member:
    newest: tuple[int, int]
    heard_at: float
    left: bool = False
    local_step: int = -1
    stepped_at: float = 0.0
    waiting: bool = False
    passed: dict[int, int] = field(default_factory=dict)


class Liveness:
    """Leases of a run's learners, in seconds of listening time."""

    def __init__(self, lease_seconds: float, stall_after_seconds: float | None = None) -> None:
        self.lease_seconds = lease_seconds
        self.stall_after_seconds = 10 * lease_seconds if stall_after_seconds is None else stall_after_seconds
        self._now = 0.0
        self._members: dict[str, _Member] = {}

    def listened(self, seconds: float) -> None:
        """The members stream was read successfully for this long since the last call.

        Call it together with `observe` for what was read, before anybody asks who is live.
        """
        self._now += max(0.0, seconds)

    @property
    def listened_a_lease(self) -> bool:
        """Whether the stream was read for so long that every live learner has been heard."""
        return self._now > self.lease_seconds

    def observe(self, message: MemberMessage) -> bool:
        """Takes a verified message in; False when it is not above the last seen (session, counter)."""
        newest = (message.session, message.counter)
        member = self._members.get(message.learner)
        if member is not None and newest <= member.newest:
            return False
        if member is None or message.session > member.newest[0]:
            passed = member.passed if member is not None else {}
            member = _Member(newest, self._now, stepped_at=self._now, passed=passed)
            self._members[message.learner] = member
        member.newest = newest
        member.heard_at = self._now
        match message:
            case AliveMessage():
                if message.local_step != member.local_step:
                    member.local_step, member.stepped_at = message.local_step, self._now
                member.waiting = message.waiting
            case LeaveMessage():
                member.left = True
            case PassMessage():
                before = member.passed.get(message.fragment, 0)
                member.passed[message.fragment] = max(before, message.version)
        return True

    def contributed(self, learner: str) -> None:
        """A verified contribution renews its learner's lease too, and shows that it makes steps."""
        member = self._members.get(learner)
        if member is not None and not member.left:
            member.heard_at = member.stepped_at = self._now

    def live(self) -> frozenset[str]:
        """The learners whose lease lasts, who have not left and who still make steps, or wait at a barrier.

        When none has made a step for so long and the rest wait, they wait for each other, at barriers of
        different fragments: then nobody counts, and the rounds close with those who contributed.
        """
        there = {
            learner: member
            for learner, member in self._members.items()
            if not member.left and self._now - member.heard_at <= self.lease_seconds
        }
        stepping = {
            learner
            for learner, member in there.items()
            if self._now - member.stepped_at <= self.stall_after_seconds
        }
        if not stepping:
            return frozenset()
        return frozenset(
            learner for learner, member in there.items() if learner in stepping or member.waiting
        )

    def passed(self, fragment: int, version: int) -> frozenset[str]:
        """The learners that passed the round of `fragment` with base `version`."""
        return frozenset(
            learner for learner, member in self._members.items() if member.passed.get(fragment) == version
        )
