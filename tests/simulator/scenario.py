"""Scenario: what a seed decides before anything runs: who takes part, what may go wrong, and how often.

`BY_CALL` faults strike single calls of store, streams and ledger; `PLANNED` ones strike at a turn,
`AT_POINTS` when a process reaches one of the steps that `deltapost.points` names. A fault that no seed ever
meets is a hole: the command counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from deltapost.algorithms.diloco import DiLoCo, WeightedMean
from deltapost.points import LEARNER_POINTS, POINTS, RECOVERY_POINTS

BY_CALL = (
    "store.refused",
    "store.reply_lost",
    "store.delayed",
    "store.answered_late",
    "log.refused",
    "log.reply_lost",
    "log.delayed",
    "log.answered_late",
    "log.twice",
    "log.lost",
    "ledger.refused",
    "ledger.rolled_back",
    "ledger.reply_lost",
    "ledger.delayed",
)

PLANNED = (
    "store.outage",
    "log.outage",
    "ledger.outage",
    "store.object_fails",
    "store.payload_vanishes",
    "store.payload_altered",
    "log.emptied",
    "log.rolled_back",
    "log.trimmed",
    "log.epoch_lost",
    "log.stream_lost",
    "log.clock_back",
    "ledger.restored",
    "ledger.dropped",
    "process.killed",
    "process.stopped",
    "learner.leaves",
    "learner.disk_lost",
)

AT_POINTS = ("kill", "stop", "lost")

HOSTILE = (
    "replay",
    "replay_other_fragment",
    "replay_other_run",
    "conflict",
    "other_counters",
    "ahead",
    "missing",
    "garbage",
    "forged",
    "unknown_learner",
    "over_quota",
    "zero_steps",
    "outlier",
    "non_finite",
    "schema",
    "malformed",
    "corrupt",
    "member_replay",
    "member_forged",
)


@dataclass(frozen=True)
class Planned:
    """One fault with its moment: at a turn, or when a point is reached for the `count`th time."""

    number: int
    kind: str
    turn: int = 0
    point: str = ""
    count: int = 1


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed fixes; the schedule itself comes from the seed's generators."""

    seed: int
    config: DiLoCo
    learners: int
    late_learners: int
    aggregators: int
    hostile: frozenset[str]
    key_is_pinned: bool
    cache_bytes: int
    step_seconds: float
    turns: int
    calls: frozenset[str]
    rate: float
    budget: int
    planned: tuple[Planned, ...]

    @classmethod
    def of(cls, seed: int) -> Scenario:
        chance = Random(f"scenario {seed}")
        learners = chance.choice((1, 2, 2, 3, 3))
        fragments = chance.choice((1, 1, 2))
        calm = chance.random() < 0.05
        calls = frozenset(kind for kind in BY_CALL if not calm and chance.random() < 0.4)
        turns = chance.randrange(400, 1_600)
        hostile = frozenset(kind for kind in HOSTILE if chance.random() < 0.35)
        return cls(
            seed=seed,
            config=_config(chance, learners, fragments),
            learners=learners,
            late_learners=chance.choice((0, 0, 1)),
            aggregators=chance.choice((1, 2, 2, 2, 3)),
            hostile=frozenset() if calm or chance.random() < 0.4 else hostile,
            key_is_pinned=chance.random() < 0.7,
            cache_bytes=chance.choice((0, 0, 2**20)),
            step_seconds=chance.choice((0.1, 0.5, 2.0)),
            turns=turns,
            calls=calls,
            rate=chance.choice((0.005, 0.02, 0.06)),
            budget=chance.choice((3, 10, 40)),
            planned=() if calm else tuple(_planned(chance, turns)),
        )

    def without(self, numbers: frozenset[int]) -> Scenario:
        """The same without some of the planned faults."""
        return replace(self, planned=tuple(one for one in self.planned if one.number not in numbers))


def _config(chance: Random, learners: int, fragments: int) -> DiLoCo:
    quorum = chance.randrange(1, learners + 1)
    return DiLoCo(
        sync_every=fragments * chance.choice((1, 2)),
        fragments=fragments,
        in_flight=chance.randrange(1, fragments + 1),
        outer_lr=0.5,
        merge=WeightedMean(),
        overlap_steps=chance.choice((None, None, 0, 1)),
        stall_after_seconds=60.0,
        quorum_size=quorum,
        min_quorum=chance.randrange(1, quorum + 1) if chance.random() < 0.3 else 1,
        grace_seconds=chance.choice((0.0, 0.0, 3.0, None)),
        commit_dtype=chance.choice((None, "BF16")),
        max_delta_norm=50.0,
    )


def _planned(chance: Random, turns: int) -> list[Planned]:
    kinds = [kind for kind in PLANNED if chance.random() < 0.25]
    found: list[Planned] = []
    for kind in kinds:
        for _ in range(chance.choice((1, 1, 2))):
            found.append(Planned(len(found), kind, turn=chance.randrange(50, turns - 50)))
    for _ in range(chance.choice((0, 2, 3, 5))):
        learner = chance.random() < 0.1
        point = chance.choice(LEARNER_POINTS if learner else POINTS)
        kind = chance.choice(AT_POINTS)
        count = 1 if point in RECOVERY_POINTS else chance.choice((1, 1, 2, 3, 5))
        found.append(Planned(len(found), kind, point=point, count=count))
    if (
        chance.random() < 0.15
    ):  # the most telling pair: an owner stopped before a write, SQL restored meanwhile
        point = chance.choice(("record.before_put", "intake.tx_sent", "seal.tx_sent", "round.tx_sent"))
        found.append(Planned(len(found), "stop", point=point))
        found.append(Planned(len(found), "ledger.restored", turn=chance.randrange(100, turns - 50)))
    return found
