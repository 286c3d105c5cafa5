"""World: one seed's bucket, streams, ledger and processes, from the first turn to the verdict.

First everything that the scenario plans goes wrong. Then it heals: whoever is dead or stopped comes back, no
call fails any more, and all must settle: every round closed, every journalled contribution answered, SQL
where the bucket is.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from deltapost.adapters.native import ArrayModel
from deltapost.algorithms.partition import ByBytes
from deltapost.learner.creating import create_run
from deltapost.learner.following import Follower
from deltapost.learner.journal import Journal
from deltapost.learner.session import Aligned, Run
from deltapost.points import lost_reply
from deltapost.serialization.names import envelope_stream, parse_key
from deltapost.stores import Blob
from deltapost.stores.memory import MemoryStore
from fixtures.pipeline import AGGREGATOR_KEY, RUN, arrays, learner_signing_key
from simulator import environment
from simulator.aggregators import start_aggregator
from simulator.boundary import Boundary
from simulator.finishing import unfinished
from simulator.hostile import NAME, Mallory
from simulator.invariants import History
from simulator.invariants_ledger import LedgerChecks
from simulator.learners import machine, start_learner
from simulator.ledger import SimulatedLedger, database
from simulator.log import FaultyLog, ForgetfulLog
from simulator.scenario import Planned, Scenario
from simulator.scheduling import Killed, Process, Scheduler
from simulator.store import FaultyStore

LEARNERS = ("ada", "bob", "cyd", "dan")
#: Turns after the faults in which everything has to settle, and the seconds that an earlier delay may last:
#: meanwhile the others go on, and use turns up.
TURNS_TO_SETTLE = 8_000
SECONDS_TO_SETTLE = 90.0
MOST_TURNS_TO_SETTLE = 40_000
#: Rounds that each fragment has to close after the faults: what was posted before is answered then.
ROUNDS_TO_SETTLE = 1
TRACE_LINES = 400
#: Turns between two copies of database and streams that a restore may go back to.
SAVE_EVERY = 97


@dataclass
class Slot:
    """A process that is started again when it ends, a while later."""

    name: str
    start: Callable[[Process], None]
    first_at: float
    process: Process | None = None
    restart_at: float | None = None
    leaving: bool = False
    #: The run has ended, and this learner knows.
    over: bool = False
    run: Run | None = None
    versions: dict[int, int] = field(default_factory=dict)


class World:
    """One seed. `run` returns what went wrong, or None."""

    def __init__(self, scenario: Scenario, directory: Path, *, skipped: frozenset[str] = frozenset()) -> None:
        self.scenario = scenario
        self.directory = directory
        self.failure: str | None = None
        self.healed = False
        self.targets: list[int] = []
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.reached: Counter[str] = Counter()
        self.names = LEARNERS[: scenario.learners + scenario.late_learners]
        self.frames: list[tuple[int, bytes]] = []
        self.chance = Random(f"environment {scenario.seed}")
        self.scheduler = Scheduler(
            Random(f"schedule {scenario.seed}"), after_turn=self._after_turn, trace=self.note
        )
        self.boundary = Boundary(scenario, self.scheduler, skipped)
        self.aggregator_key = AGGREGATOR_KEY
        self.bucket = MemoryStore()
        self.streams = ForgetfulLog(self.scheduler)
        self.database = database()
        self.database.restore(self.database.empty)
        self.plan = create_run(
            self.bucket,
            RUN,
            ArrayModel(arrays(0)),
            scenario.config,
            learner_signing_key("creator"),
            partition=ByBytes(),
            aggregator_key=AGGREGATOR_KEY.public if scenario.key_is_pinned else None,
        )
        honest = frozenset(self.names)
        self.history = History(
            self.bucket, self.plan, AGGREGATOR_KEY.public, honest, self._was_read, self.fail
        )
        self.checks = LedgerChecks(self.database, self.history)
        self.store = FaultyStore(
            self.bucket, self.boundary, self.history.put, self.history.before_delete, self._got
        )
        self.log = FaultyLog(self.streams, self.boundary, self.scheduler, self._appended)
        self.ledger = SimulatedLedger(self.database, self.boundary, self.scheduler, self.checks.committed)
        self._planned = [one for one in scenario.planned if f"p{one.number}" not in skipped]
        self._armed = {one: one.count for one in self._planned if one.point}
        #: Older copies of database and streams, for those who are restored.
        self.saved: list[bytes] = []
        self.saved_streams: tuple[object, object] | None = None
        #: Payloads that the bucket lost, as they were, and which of them have other bytes now.
        self.lost: dict[str, bytes] = {}
        self.altered: list[str] = []
        self.rounds_to_settle = ROUNDS_TO_SETTLE
        self._healed_at = 0.0
        self.slots = self._make_slots()

    def _make_slots(self) -> list[Slot]:
        slots = [
            Slot(name, partial(self._start_aggregator, name), 0.0)
            for name in (f"agg-{number}" for number in range(self.scenario.aggregators))
        ]
        for number, learner in enumerate(self.names):
            late = number >= self.scenario.learners
            first_at = self.chance.uniform(10, 60) if late else self.chance.uniform(0, 2)
            slots.append(Slot(learner, partial(self._start_learner, learner), first_at))
        if self.scenario.hostile:
            slots.append(Slot(NAME, lambda process: process.spawn("", Mallory(self, process).run), 1.0))
        return slots

    def _start_aggregator(self, name: str, process: Process) -> None:
        start_aggregator(self, process, name)

    def _start_learner(self, learner: str, process: Process) -> None:
        start_learner(self, process, learner)

    def run(self) -> str | None:
        """Plays the seed; what did not hold, or None."""
        keeper = self.scheduler.process("keeper")
        keeper.spawn("", lambda: self._keep(keeper))
        with machine(self):
            self.scheduler.run()
        if self.scheduler.crash is not None:
            name, error = self.scheduler.crash
            self.fail(f"{name} crashed: {error!r}")
        if self.failure is None:
            self.history.check_all_objects()
        return self.failure

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self.note(f"FAILED: {reason}")

    def note(self, line: str) -> None:
        self.trace.append(f"{self.scheduler.turns:6d} {self.scheduler.now - 1000:8.2f} {line}")

    def _keep(self, keeper: Process) -> None:
        """Starts processes, again after their deaths, and looks whether all has settled."""
        origin = self.scheduler.now
        while self.failure is None:
            for slot in self.slots:
                self._keep_slot(slot, origin)
            if self.healed and not self.unsettled():
                return
            keeper.sleep(0.5)

    def _keep_slot(self, slot: Slot, origin: float) -> None:
        now = self.scheduler.now
        if slot.process is None:
            if now - origin >= slot.first_at or self.healed:
                self._start(slot)
            return
        if not slot.process.ended or slot.over or (slot.name == NAME and self.healed):
            return
        if slot.restart_at is None:
            slot.restart_at = now + self.chance.choice((0.2, 2.0, 10.0, 40.0))
        elif now >= slot.restart_at or self.healed:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        slot.restart_at, slot.leaving, slot.run = None, False, None
        slot.process = self.scheduler.process(slot.name)
        self.note(f"{slot.name} starts")
        slot.start(slot.process)

    def _after_turn(self) -> bool:
        turns = self.scheduler.turns
        if turns % SAVE_EVERY == 0 and not self.healed:
            self._save()
        for one in [p for p in self._planned if p.turn and p.turn <= turns]:
            self._planned.remove(one)
            environment.strike(self, one)
        if not self.healed and turns >= self.scenario.turns:
            environment.heal(self)
            self._healed_at = self.scheduler.now
        since = turns - self.scenario.turns
        long = since >= TURNS_TO_SETTLE and self.scheduler.now - self._healed_at >= SECONDS_TO_SETTLE
        if long or since >= MOST_TURNS_TO_SETTLE:
            waiting = "; ".join(self.checks.waiting())
            self.fail(f"not settled {since} turns after the faults: {self.unsettled()} {waiting}")
        return self.failure is not None or (self.healed and turns % 64 == 0 and not self.unsettled())

    def _save(self) -> None:
        if any(one.kind == "ledger.restored" for one in self._planned):
            self.saved.append(self.database.copy())
        if any(one.kind == "log.rolled_back" for one in self._planned) and self.chance.random() < 0.5:
            self.saved_streams = self.streams.saved()

    def reach(self, process: Process, point: str) -> None:
        """A process passes one of the named points: the moment for what is armed there."""
        self.reached[point] += 1
        for one in list(self._armed):
            if one.point != point or self.healed:
                continue
            self._armed[one] -= 1
            if self._armed[one] > 0:
                continue
            del self._armed[one]
            self.boundary.strike(f"{one.kind}@{point}", f"(p{one.number}) {process.name}")
            if one.kind == "kill":
                process.kill()
                raise Killed
            if one.kind == "lost":
                raise lost_reply(point)
            process.stop(self.chance.choice((5.0, 20.0, 60.0, 200.0)))
        self.scheduler.turn(point)

    def planned_strike(self, one: Planned, detail: str) -> None:
        self.boundary.strike(one.kind, f"(p{one.number}) {detail}")

    def _appended(self, stream: str, data: bytes) -> None:
        self.history.appended(stream, data)
        for fragment in range(len(self.plan.fragments)):
            if stream == envelope_stream(RUN, fragment):
                self.frames.append((fragment, data))

    def _got(self, key: str, blob: Blob) -> None:
        actor = self.scheduler.current
        parsed = parse_key(key)
        if actor is None or parsed is None or parsed.area != "deltas" or actor.process.name in self.names:
            return
        if hashlib.sha256(blob.data).digest() == parsed.sha256:
            actor.process.read.add(key)

    def _was_read(self, key: str) -> bool:
        actor = self.scheduler.current
        return actor is not None and key in actor.process.read

    def slot_of(self, name: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == name)

    def leaves(self, process: Process) -> bool:
        return self.slot_of(process.name).leaving

    def state_directory(self, learner: str) -> Path:
        return self.directory / learner

    def key_file(self, learner: str) -> Path:
        path = self.directory / f"{learner}.key"
        if not path.exists():
            learner_signing_key(learner).save(path)
        return path

    def joined(self, learner: str, run: Run) -> None:
        slot = self.slot_of(learner)
        slot.run = run
        for fragment, version in enumerate(run.versions):
            self._held(learner, fragment, version)

    def aligned(self, learner: str, run: Run, news: list[Aligned]) -> None:
        """The learner's model holds newer versions."""
        for one in news:
            self._held(learner, one.fragment, one.version)

    def _held(self, learner: str, fragment: int, version: int) -> None:
        versions = self.slot_of(learner).versions
        if version < versions.get(fragment, 0):
            self.fail(f"{learner} went back from version {versions[fragment]} to {version}")
        versions[fragment] = version

    def learner_stepped(self, learner: str, follower: Follower, journal: Journal) -> None:
        """What the learner follows is the bucket's history, and its journal says what the records say."""
        for fragment in range(len(self.plan.fragments)):
            version, sha256 = follower._newest[fragment]
            if version > self.history.tip(fragment) or sha256 != self.history.sha256(fragment, version):
                self.fail(f"{learner} follows a version {version} of fragment {fragment} that is none")
            elif version > 0 and (fragment, version) not in self.history.attested:
                self.fail(f"{learner} follows version {version} of fragment {fragment}, unattested")
        for (fragment, base), entry in journal._entries.items():
            if not entry.answered:
                continue
            merged = base < self.history.tip(fragment) and any(
                p.envelope == entry.signed.sha256 for p in self.history.records[fragment][base].participants
            )
            if merged != (entry.verdict == "accepted"):
                self.fail(f"{learner}'s journal says {entry.verdict} of base {base}, merged: {merged}")

    def unsettled(self) -> str:
        """What is not as it has to be at the end; empty when all is."""
        if self.history.end_is_wanted:
            return unfinished(self)
        for fragment, target in enumerate(self.targets):
            if self.history.tip(fragment) < target:
                return f"fragment {fragment} is at version {self.history.tip(fragment)}, not {target}"
        for slot in self.slots:
            if slot.name not in self.names:
                continue
            if slot.run is None:
                return f"{slot.name} has not joined"
            for fragment, target in enumerate(self.targets):
                if slot.versions.get(fragment, 0) < target:
                    return f"{slot.name} follows fragment {fragment} to {slot.versions.get(fragment)} only"
            for entry in slot.run._journal.unanswered():
                if entry.message.version < self.targets[entry.message.fragment]:
                    return f"{slot.name}'s contribution to base {entry.message.version} is unanswered"
        return self.checks.behind()
