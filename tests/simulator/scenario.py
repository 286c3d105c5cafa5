"""Scenario: what a seed decides before anything runs: who takes part, what may go wrong, and how often.

`BY_CALL` faults strike single calls of store, streams and ledger; `PLANNED` ones strike at a turn,
`AT_POINTS` when a process reaches one of the steps that `deltapost.points` names. A fault that no seed ever
meets is a hole: the command counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from deltapost.algorithms.diloco import DiLoCo, WeightedMean
from deltapost.points import END_POINTS, GARBAGE_POINTS, LEARNER_POINTS, POINTS, RECOVERY_POINTS

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
    "run.finished",
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
    #: None: this run's bucket is not kept.
    garbage_seconds: float | None
    retain: str
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
        garbage_seconds = chance.choice((None, None, 5.0, 30.0))
        return cls(
            seed=seed,
            config=_checkpointed(_config(chance, learners, fragments), seed),
            learners=learners,
            late_learners=chance.choice((0, 0, 1)),
            aggregators=chance.choice((1, 2, 2, 2, 3)),
            hostile=frozenset() if calm or chance.random() < 0.4 else hostile,
            key_is_pinned=chance.random() < 0.7,
            cache_bytes=chance.choice((0, 0, 2**20)),
            garbage_seconds=garbage_seconds,
            retain=chance.choice(("", "", "rounds=1", "rounds=3")) if garbage_seconds else "",
            step_seconds=chance.choice((0.1, 0.5, 2.0)),
            turns=turns,
            calls=calls,
            rate=chance.choice((0.005, 0.02, 0.06)),
            budget=chance.choice((3, 10, 40)),
            planned=() if calm else tuple(_planned(chance, turns, keeps=garbage_seconds is not None)),
        )

    def without(self, numbers: frozenset[int]) -> Scenario:
        """The same without some of the planned faults."""
        return replace(self, planned=tuple(one for one in self.planned if one.number not in numbers))


def _config(chance: Random, learners: int, fragments: int) -> DiLoCo:
    quorum, in_flight = chance.randrange(1, learners + 1), chance.randrange(1, fragments + 1)
    if in_flight < fragments:  # learners out of phase wait for each other's fragments: docs/simulator.md
        quorum = 1
    return DiLoCo(
        sync_every=fragments * chance.choice((1, 2)),
        fragments=fragments,
        in_flight=in_flight,
        outer_lr=0.5,
        merge=WeightedMean(),
        overlap_steps=chance.choice((None, None, 0, 1)),
        stall_after_seconds=chance.choice((20.0, 60.0)),
        quorum_size=quorum,
        min_quorum=chance.randrange(1, quorum + 1) if chance.random() < 0.3 else 1,
        grace_seconds=chance.choice((0.0, 0.0, 3.0, None)),
        commit_dtype=chance.choice((None, "BF16")),
        max_delta_norm=50.0,
    )


def _checkpointed(config: DiLoCo, seed: int) -> DiLoCo:
    """With the state in the bucket at every version, or at some only. Other settings stay each seed's own."""
    every = Random(f"checkpoints {seed}").choice((1, 2, 3, 5))
    return replace(config, checkpoint_every=every) if config.commit_dtype is not None else config


def _planned(chance: Random, turns: int, *, keeps: bool) -> list[Planned]:
    finishes = chance.random() < 0.15
    kinds = [kind for kind in PLANNED if kind != "run.finished" and chance.random() < 0.25]
    found: list[Planned] = []

    def plan(kind: str, turn: int = 0, point: str = "", count: int = 1) -> None:
        found.append(Planned(len(found), kind, turn=turn, point=point, count=count))

    for kind in kinds:
        for _ in range(chance.choice((1, 1, 2))):
            plan(kind, turn=chance.randrange(50, turns - 50))
    if finishes:
        plan("run.finished", turn=chance.randrange(turns // 2, turns - 50))
        for _ in range(chance.choice((1, 2))):
            plan(chance.choice(AT_POINTS), point=chance.choice(END_POINTS), count=chance.choice((1, 1, 2)))
    if keeps and chance.random() < 0.5:
        plan(chance.choice(AT_POINTS), point=chance.choice(GARBAGE_POINTS), count=chance.choice((1, 2, 5)))
    steps = [point for point in POINTS if point not in (*LEARNER_POINTS, *GARBAGE_POINTS)]
    for _ in range(chance.choice((0, 2, 3, 5))):
        point = chance.choice(LEARNER_POINTS if chance.random() < 0.1 else steps)
        kind = chance.choice(AT_POINTS)
        plan(kind, point=point, count=1 if point in RECOVERY_POINTS else chance.choice((1, 1, 2, 3, 5)))
    if (
        chance.random() < 0.15
    ):  # the most telling pair: somebody stopped before a write, SQL restored meanwhile
        telling = ["record.before_put", "intake.tx_sent", "seal.tx_sent", "round.tx_sent"]
        telling += ["gc.checked"] * 2 if keeps else []
        telling += ["end.before_put", "end.attested"] if finishes else []
        plan("stop", point=chance.choice(telling))
        plan("ledger.restored", turn=chance.randrange(100, turns - 50))
    return found
