"""Schedule: when a learner publishes which fragment, and how long a round waits for stragglers.

Everything is counted in the learner's own steps; seconds enter only as moving averages that the caller
measured. H is `sync_every` steps, P the number of fragments, τ `in_flight` (Streaming DiLoCo, Douillard et
al. 2025; Decoupled DiLoCo, 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deltapost.errors import ConfigurationError

__all__ = ["MovingAverage", "RoundTimes", "Schedule"]

#: How much of the difference to a new value a moving average takes over.
AVERAGE_RATE: Final = 0.1


@dataclass(frozen=True)
class MovingAverage:
    """ξ ← ξ + 0.1·(x − ξ); the first value is taken whole, and before it there is none."""

    value: float | None = None

    def observed(self, x: float) -> MovingAverage:
        """The average after one more value."""
        return MovingAverage(x if self.value is None else self.value + AVERAGE_RATE * (x - self.value))


@dataclass(frozen=True)
class RoundTimes:
    """What a fragment's owner measured of its rounds, in seconds.

    `step`: of one learner step. `quorum`: from a round's start to its quorum. `sync`: from the seal to the
    durable commit.
    """

    step: MovingAverage = field(default_factory=MovingAverage)
    quorum: MovingAverage = field(default_factory=MovingAverage)
    sync: MovingAverage = field(default_factory=MovingAverage)

    def observed(
        self, *, step: float | None = None, quorum: float | None = None, sync: float | None = None
    ) -> RoundTimes:
        """The averages after what was measured this time."""
        measured = {"step": step, "quorum": quorum, "sync": sync}
        averages = {
            name: getattr(self, name).observed(seconds)
            for name, seconds in measured.items()
            if seconds is not None
        }
        return replace(self, **averages)


@dataclass(frozen=True)
class Schedule:
    """1 ≤ τ ≤ P ≤ H, else ConfigurationError. `overlap_steps` None: a learner never waits for a commit.

    >>> schedule = Schedule(sync_every=10, fragments=4, in_flight=2)
    >>> [schedule.due(step - 1, step) for step in range(1, 13)]
    [(), (0,), (), (), (1,), (), (2,), (), (), (3,), (), (0,)]
    """

    sync_every: int
    fragments: int
    in_flight: int
    overlap_steps: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= self.fragments <= self.sync_every:
            raise ConfigurationError(
                f"in_flight {self.in_flight}, fragments {self.fragments}, sync_every {self.sync_every}: "
                "expected 1 ≤ in_flight ≤ fragments ≤ sync_every"
            )
        if self.overlap_steps is not None and self.overlap_steps < 0:
            raise ConfigurationError(f"overlap_steps is {self.overlap_steps}, expected 0 or more, or None")

    @property
    def gap(self) -> float:
        """Steps between two rounds, of whichever fragments: H / P."""
        return self.sync_every / self.fragments

    def round_step(self, number: int) -> int:
        """The learner step at which round `number` (version · P + fragment, from 0) is due."""
        version, fragment = divmod(number, self.fragments)
        return version * self.sync_every + (fragment + 1) * self.sync_every // self.fragments

    def due(self, after: int, through: int) -> tuple[int, ...]:
        """The fragments whose turn lies in the steps `after` < step ≤ `through`, in the order of their turns.

        A turn depends on the step alone, not on the version held: each fragment has one in any H steps, and
        one that lags is not tried more often. However many steps lie between, no fragment comes twice.
        """
        turns = [
            (turn, fragment)
            for fragment in range(self.fragments)
            if (turn := self._turn(fragment, through)) > after
        ]
        return tuple(fragment for _, fragment in sorted(turns))

    def _turn(self, fragment: int, through: int) -> int:
        """The latest step ≤ `through` at which `fragment` had its turn; 0 when it had none yet."""
        first = self.round_step(fragment)
        return through - (through - first) % self.sync_every if through >= first else 0

    def start_step(self, versions: Sequence[int]) -> int:
        """Where a learner that joins sets its clock: the fragments' median version × H, rounded down."""
        if len(versions) != self.fragments:
            raise ConfigurationError(
                f"{len(versions)} versions given, one for each of {self.fragments} fragments"
            )
        ordered = sorted(versions)
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        return (low + high) * self.sync_every // 2

    def may_publish(self, outstanding: int) -> bool:
        """Whether one more round may be outstanding; if not, the publish is skipped and steps accumulate."""
        return outstanding < self.in_flight

    def must_wait(self, steps_since_publish: int) -> bool:
        """Whether a learner stops until the commit, so many steps after a publish no record answered yet."""
        return self.overlap_steps is not None and steps_since_publish >= self.overlap_steps

    @property
    def ahead(self) -> float:
        """Steps that a learner makes between a publish and the moment it needs the commit."""
        reach = self.in_flight * self.gap
        return reach if self.overlap_steps is None else min(reach, self.overlap_steps)

    def grace_seconds(self, times: RoundTimes) -> float:
        """How long a round that has its quorum waits for more: half of what is left, one gap at most.

        min(½·max(ahead·ξ_step − (ξ_quorum + ξ_sync), 0), gap·ξ_step); 0 while one of them is missing.
        """
        step, quorum, sync = times.step.value, times.quorum.value, times.sync.value
        if step is None or quorum is None or sync is None:
            return 0.0
        return min(0.5 * max(self.ahead * step - (quorum + sync), 0.0), self.gap * step)
