"""Rebuild: the SQL ledger of a run again from its bucket alone, every record verified on the way.

Each round is written by the transaction that its owner would have used (`ledger.rounds.index`), under the
fragment's lease: a live owner is never raced. Fragments advance together, in the order in which their
attestations say that rounds were committed, each by its own chain. What the ledger has already is compared,
and completed where rows are missing; so a rebuild that was stopped is simply run again.

It stops at the first thing that does not hold and says what and how far it came. A record without attestation
is no fault: only an aggregator can vouch for it, and the next one that owns the fragment does.

Not history, and so not rebuilt: who is live, envelopes that no record answered, stream positions. Streams are
read from their start; what a record answered counts only as a delivery there.

Failure modes. Store or database not available: raised, run it again. Another manifest than the ledger's:
RunMismatch. Retention takes no record away, so it takes nothing from a rebuild.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import select

from deltapost.algorithms.checkpoints import checkpoint_of
from deltapost.audit.history import Attested, BucketHistory, Unattested
from deltapost.errors import HistoryError, LeaseLost, MalformedMessage, ObjectMissing, SignatureRefused
from deltapost.events import events
from deltapost.ledger import completing, leases, registry, rounds, runs
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease
from deltapost.ledger.tables import FragmentRow
from deltapost.limits import LEASE_SECONDS
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import anchor_key, delta_key, outer_key, record_key
from deltapost.serialization.records import Record
from deltapost.stores import ObjectStore
from deltapost.stores.registry import entries_after

logger = events(__name__)

#: Records that are fetched ahead of the one being written, per fragment, and threads that fetch.
AHEAD: Final = 4
THREADS: Final = 8

#: What the bucket may be found to be wrong with.
_Contradiction: Final = (HistoryError, SignatureRefused, MalformedMessage)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FragmentRebuilt:
    """Where a fragment stands now. `note`: why it is not at the bucket's newest record, if so."""

    fragment: int
    head: int
    records: int
    note: str | None = None


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild did. `stopped`: the first thing that did not hold; None when all did."""

    run: str
    added: int
    completed: int
    learners: int
    fragments: tuple[FragmentRebuilt, ...]
    stopped: str | None


def rebuild(
    ledger: Ledger, store: ObjectStore, run: str, *, progress: Progress = lambda _done, _of: None
) -> Rebuilt:
    """Writes the run's rounds, participants, verdicts, counts and learners from the bucket.

    `progress` is called with the records done and all there are. Raises ConfigurationError when the bucket
    has no such run, RunMismatch when the ledger knows another manifest of its name.
    """
    history = BucketHistory.open(store, run)
    runs.admit(ledger, history.manifest)
    return _Rebuild(ledger, history, progress).run()


class _Walk:
    """One fragment's way from its first record to its newest."""

    def __init__(self, history: BucketHistory, fragment: int, lease: Lease, pool: ThreadPoolExecutor) -> None:
        self.fragment = fragment
        self.lease = lease
        self.versions = history.versions(fragment)
        self.note: str | None = None
        self._history = history
        self._previous = history.manifest_sha256
        self._found = self._read_ahead(pool)

    @property
    def newest(self) -> int:
        """The highest version with a record."""
        return self.versions[-1] if self.versions else 0

    def next(self) -> Attested | None:
        """The next record; None at the newest, or before one that nobody attested. Raises HistoryError …"""
        found = next(self._found, None)
        if found is None:
            return None
        self._history.check_chain(found.record, self._previous)
        if isinstance(found, Unattested):
            self.note = (
                f"record {found.record.version} has no attestation: the aggregator that owns the fragment "
                "checks it and attests it"
            )
            return None
        self._previous = found.sha256
        return found

    def _read_ahead(self, pool: ThreadPoolExecutor) -> Iterator[Attested | Unattested]:
        pending: deque[Future[Attested | Unattested | None]] = deque()
        for number, version in enumerate(self.versions, start=1):
            pending.append(pool.submit(self._history.read, self.fragment, number))
            if version != number:  # that read finds nothing, or what a listing has just missed
                break
            if len(pending) > AHEAD:
                yield self._there(pending.popleft().result(), number - len(pending))
        for left in range(len(pending), 0, -1):
            yield self._there(pending.popleft().result(), number - left + 1)

    def _there(self, found: Attested | Unattested | None, version: int) -> Attested | Unattested:
        if found is None:
            raise HistoryError(
                f"the record {record_key(self._history.run, self.fragment, version)!r} is missing, and later "
                "ones are there",
                hint="restore it from a copy of the bucket: nothing after it can be checked without it",
            )
        return found


class _Rebuild:
    def __init__(self, ledger: Ledger, history: BucketHistory, progress: Progress) -> None:
        self._ledger = ledger
        self._history = history
        self._progress = progress
        self._owner = f"rebuild-{socket.gethostname()[:64]}-{os.getpid()}"
        self._walks: dict[int, _Walk] = {}
        self._notes: dict[int, str] = {}
        self._added = 0
        self._completed = 0
        self._renew_at = 0.0

    def run(self) -> Rebuilt:
        stopped: str | None = None
        with ThreadPoolExecutor(THREADS, thread_name_prefix="rebuild") as pool:
            try:
                self._take_leases(pool)
                self._write_all()
                self._check_newest()
            except _Contradiction as error:
                stopped = str(error)
            finally:
                pool.shutdown(cancel_futures=True)
                for walk in self._walks.values():
                    leases.release(self._ledger, walk.lease)
        learners = 0
        try:
            self._index_registry()
            learners = completing.add_learners(self._ledger, self._history.run, self._history.learners())
        except _Contradiction as error:
            stopped = stopped or str(error)
        rebuilt = Rebuilt(
            run=self._history.run,
            added=self._added,
            completed=self._completed,
            learners=learners,
            fragments=tuple(self._standing(fragment) for fragment in range(self._history.fragments)),
            stopped=stopped,
        )
        logger.info(
            "ledger_rebuilt",
            extra={"run": rebuilt.run, "rounds": rebuilt.added, "learners": learners, "stopped": stopped},
        )
        return rebuilt

    def _index_registry(self) -> None:
        """Writes the entries of learner keys that the ledger lacks, each verified against those before it."""
        manifest = self._history.manifest
        known = registry.load(self._ledger, manifest)
        missing = entries_after(self._history.store, manifest, number=known.number, previous=known.head)
        registry.index(self._ledger, manifest.run, list(missing))

    def _take_leases(self, pool: ThreadPoolExecutor) -> None:
        for fragment in range(self._history.fragments):
            lease = leases.acquire(
                self._ledger, self._history.run, fragment, self._owner, take_own=False, seconds=LEASE_SECONDS
            )
            if lease is None:
                self._notes[fragment] = f"{self._owner_of(fragment)} owns it, and adopts records by itself"
            else:
                self._walks[fragment] = _Walk(self._history, fragment, lease, pool)
        self._renew_at = time.monotonic() + LEASE_SECONDS / 3

    def _write_all(self) -> None:
        """Writes every record, the fragments' chains merged by the time of commit."""
        heads = {
            fragment: runs.standing(self._ledger, self._history.run, fragment) for fragment in self._walks
        }
        total = sum(len(walk.versions) for walk in self._walks.values())
        due: list[tuple[datetime, int, Attested]] = []
        for fragment, walk in self._walks.items():
            if heads[fragment].head > walk.newest:
                raise HistoryError(
                    f"fragment {fragment} of run {self._history.run!r}: the ledger is at version "
                    f"{heads[fragment].head}, the bucket's newest record is of version {walk.newest}",
                    hint="the ledger belongs to another bucket, or records were removed",
                )
            self._push(due, walk)
        done = 0
        while due:
            _, fragment, found = heapq.heappop(due)
            walk, before = self._walks[fragment], heads[fragment]
            try:
                self._renew()
                if found.record.version > before.head:
                    rounds.index(self._ledger, walk.lease, found.record, found.attestation)
                    self._added += 1
                else:
                    if found.record.version == before.head and found.sha256 != before.head_sha256:
                        raise HistoryError(
                            f"fragment {fragment} of run {self._history.run!r}: the ledger's head "
                            f"{before.head} is record {before.head_sha256.hex()[:16]}…, the bucket's is "
                            f"{found.sha256.hex()[:16]}…"
                        )
                    self._completed += completing.complete(
                        self._ledger, walk.lease, found.record, found.attestation
                    )
            except LeaseLost:
                self._notes[fragment] = (
                    f"{self._owner_of(fragment)} took it over, and adopts records by itself"
                )
                continue
            done += 1
            self._progress(done, total)
            self._push(due, walk)

    def _push(self, due: list[tuple[datetime, int, Attested]], walk: _Walk) -> None:
        found = walk.next()
        if found is not None:
            moment = datetime.fromisoformat(found.observations.committed_at)
            heapq.heappush(due, (moment, walk.fragment, found))

    def _renew(self) -> None:
        if time.monotonic() < self._renew_at:
            return
        for walk in self._walks.values():
            with contextlib.suppress(LeaseLost):  # noted where its next record cannot be written
                leases.renew(self._ledger, walk.lease, seconds=LEASE_SECONDS)
        self._renew_at = time.monotonic() + LEASE_SECONDS / 3

    def _check_newest(self) -> None:
        """What the next round starts from is there: the last checkpoint, the payloads since. HistoryError."""
        run = self._history.run
        for fragment in self._walks:
            head = runs.standing(self._ledger, run, fragment).head
            for version in range(checkpoint_of(head, self._history.checkpoint_every), head + 1):
                record = rounds.record_of(self._ledger, run, fragment, version)
                if record is None:  # version 0
                    continue
                base = record.base
                if record.checkpoint:
                    self._check(anchor_key(run, fragment, base, record.anchor.sha256), record.anchor, record)
                    self._check(outer_key(run, fragment, base, record.outer.sha256), record.outer, record)
                else:
                    for one in record.participants:
                        key = delta_key(run, one.learner, fragment, base, one.payload.sha256)
                        self._check(key, one.payload, record)

    def _check(self, key: str, ref: ObjectRef, record: Record) -> None:
        try:
            size = self._history.store.head(key).size
        except ObjectMissing:
            size = None
        if size != ref.size:
            raise HistoryError(
                f"the object {key!r}, which record {record.version} of fragment {record.fragment} names, "
                + ("is missing" if size is None else f"has {size} bytes, expected {ref.size}"),
                hint="restore it from a copy of the bucket: the next round starts from it",
            )

    def _owner_of(self, fragment: int) -> str:
        with self._ledger.read() as session:
            owner = session.scalars(
                select(FragmentRow.owner).where(
                    FragmentRow.run == self._history.run, FragmentRow.fragment == fragment
                )
            ).one()
        return f"aggregator {owner!r}"

    def _standing(self, fragment: int) -> FragmentRebuilt:
        walk = self._walks.get(fragment)
        note = self._notes.get(fragment) or (walk.note if walk is not None else None)
        records = len(walk.versions) if walk is not None else len(self._history.versions(fragment))
        head = runs.standing(self._ledger, self._history.run, fragment).head
        return FragmentRebuilt(fragment, head, records, note)
