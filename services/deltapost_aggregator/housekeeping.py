"""Housekeeping: retention, garbage and killed uploads, a little at a time, beside the rounds.

A pass looks at the fragments whose lease this process holds: only so that work is not done twice, as what it
deletes is decided by `garbage`'s predicate whoever holds what. It covers the versions of the newest two
blocks of a hundred, one older block in turn, and those that retention has just let go. A step lists one
prefix, at most a hundred versions of one area or learner, and deletes what may go of it.

Failure modes. A store or ledger that does not answer ends the step, which is done again. Where the policy
forbids to list or delete, it says so in the log and leaves the bucket as it is: rounds do not depend on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from deltapost.algorithms.retention import Retain
from deltapost.audit.history import BucketHistory
from deltapost.errors import AccessDenied
from deltapost.events import events
from deltapost.ledger import upkeep
from deltapost.serialization.names import BLOCK_VERSIONS, OBJECT_AREAS, ObjectArea, block_prefix
from deltapost.stores import UploadsStore
from deltapost_aggregator import retention
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.garbage import Judge, sweep

logger = events(__name__)

#: Blocks at the head that every pass covers: late orphans lie there.
NEWEST_BLOCKS: Final = 2

#: Seconds until fragments of one's own are looked for again; no longer than between two passes.
LOOK_SECONDS: Final = 10.0

#: Seconds between two listings of a process, no longer than between two passes: a thousand learners make
#: long passes, not many requests.
REST_SECONDS: Final = 1.0


@dataclass(frozen=True)
class _Unit:
    """One prefix to list: an area's, or one learner's deltas, over one block of versions."""

    area: ObjectArea
    fragment: int
    block: int
    learner: str | None = None


class Housekeeping:
    """All served runs' housekeepers, in turn, in one thread that calls `step` in a loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._keepers: deque[Housekeeper] = deque()

    def serve(self, context: RunContext) -> None:
        """Keeps this run's bucket from now on."""
        self._keepers.append(Housekeeper(context))

    def step(self, wait_seconds: float) -> None:
        """Does one unit of the next run that has one to do; waits when none has. Raises its failure."""
        for _ in range(len(self._keepers)):
            keeper = self._keepers.popleft()
            if keeper.finished:  # nobody owns its fragments any more: `deltapost gc` collects the rest
                continue
            self._keepers.append(keeper)  # first: a run that fails does not hold up the others
            if keeper.step() is not None:
                self._services.sleep(min(REST_SECONDS, self._services.settings.garbage_seconds))
                return
        self._services.sleep(wait_seconds)


class Housekeeper:
    """Keeps one run's bucket."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._services = context.services
        settings = context.services.settings
        self._run = context.run
        self._history = BucketHistory(
            context.services.store, context.plan.manifest, context.services.key.public
        )
        self._judge = Judge(self._history, named=context.named)
        self._retain = Retain.parse(settings.retain) if settings.retain else None
        self._next_pass = context.services.monotonic()
        self._units: deque[_Unit] = deque()
        self._turn: dict[int, int] = {}
        self._swept_through: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self._context.finished

    def step(self) -> int | None:
        """Does one unit of a pass; returns how many objects went, or None when no pass is due."""
        if not self._units and self._services.monotonic() < self._next_pass:
            return None
        try:
            if not self._units:
                self._begin_pass()
                return 0
            gone = self._sweep(self._units[0])
            self._units.popleft()
        except AccessDenied as error:
            logger.warning("garbage_not_collected", extra={"run": self._run, "reason": str(error)})
            self._units.clear()
            self._next_pass = self._services.monotonic() + self._services.settings.garbage_seconds
            return 0
        return gone

    def _begin_pass(self) -> None:
        heads = upkeep.heads(self._services.ledger, self._run)
        owned = upkeep.owned(self._services.ledger, self._run, self._services.settings.aggregator_name)
        owned = [fragment for fragment in owned if fragment in heads]
        self._judge.refresh()
        learners = self._history.learner_ids() if owned else []
        units: list[_Unit] = []
        released: dict[int, int] = {}
        for fragment in owned:
            released[fragment] = self._let_go(fragment)
            for block in sorted(self._blocks(fragment, heads[fragment], released[fragment])):
                for area in OBJECT_AREAS:
                    for learner in learners if area == "deltas" else (None,):
                        units.append(_Unit(area, fragment, block, learner))
        if 0 in owned:
            self._abort_uploads()
        # From here on nothing fails: what fails above is done again from its start.
        self._units.extend(units)
        self._swept_through |= released
        for fragment in owned:
            self._turn[fragment] = self._turn.get(fragment, 0) + 1
        pause = self._services.settings.garbage_seconds
        self._next_pass = self._services.monotonic() + (pause if owned else min(pause, LOOK_SECONDS))

    def _let_go(self, fragment: int) -> int:
        """Lets go of what the policy says; the version through which rounds are let go."""
        if self._retain is not None:
            released = retention.planned(
                self._services.ledger, self._history, fragment, self._retain, at_once=False
            )
            if released is not None:
                return retention.note(self._history, released, self._services.key).through
        standing = self._history.released(fragment)
        return standing.through if standing is not None else 0

    def _blocks(self, fragment: int, head: int, through: int) -> set[int]:
        """The blocks of base versions that this pass covers."""
        newest = max(head - 1, 0) // BLOCK_VERSIONS
        oldest_of_newest = max(0, newest - NEWEST_BLOCKS + 1)
        blocks = set(range(oldest_of_newest, newest + 1))
        if oldest_of_newest:
            blocks.add(self._turn.get(fragment, 0) % oldest_of_newest)
        # How far an earlier process came with a span it let go is not known: from the start, once.
        before = self._swept_through.get(fragment, 0)
        if through > before:
            blocks |= set(range(max(before - 2, 0) // BLOCK_VERSIONS, through // BLOCK_VERSIONS + 1))
        return blocks

    def _sweep(self, unit: _Unit) -> int:
        prefix = block_prefix(self._run, unit.area, unit.fragment, unit.block, learner=unit.learner)
        swept = sweep(
            self._history,
            self._judge,
            self._services.store.list(prefix),
            reach=self._services.reach,
        )
        gone = swept.gone()
        facts: dict[str, object] = {"run": self._run, "prefix": prefix}
        if gone.objects:
            logger.info("garbage_collected", extra=facts | {"objects": gone.objects, "bytes": gone.bytes})
        if swept.foreign:
            logger.warning(
                "foreign_objects", extra=facts | {"objects": len(swept.foreign), "first": swept.foreign[0]}
            )
        return gone.objects

    def _abort_uploads(self) -> None:
        store = self._services.store
        if not isinstance(store, UploadsStore):
            return
        for upload in store.unfinished(
            f"{self._run}/", idle_seconds=self._services.settings.abandoned_upload_seconds
        ):
            store.abort(upload)
            logger.info("upload_aborted", extra={"run": self._run, "key": upload.key})
