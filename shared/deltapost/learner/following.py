"""Following commits: from a version in the bucket to a verified anchor, by records, never by trust.

A record counts once the aggregators' attestation of it verifies; `anchors` reads what it names. Both come
with an announcement or from the bucket, and are checked alike; what does not hold there is read from the
bucket.

Nothing is listed. Without the right to list, a store refuses to read what is not there; so a refusal counts
as "not there (yet)" where a version is only looked for, and is raised where one is known to be there. Wrong
credentials are raised everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltapost.adapters import Backend
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import ForkedHistory, HistoryError, NotReadable, ObjectMissing
from deltapost.events import events
from deltapost.learner.anchors import GONE, Anchors
from deltapost.learner.announcements import UNKNOWN, Announced
from deltapost.learner.chain import check_link, check_slot
from deltapost.learner.history import History
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization import TensorBytes
from deltapost.serialization.ends import FragmentEnd, read_slot
from deltapost.serialization.names import (
    attestation_key,
    end_key,
    record_key,
)
from deltapost.serialization.records import Attestation, Record
from deltapost.stores import ObjectStore
from deltapost.stores.heads import newest_version

logger = events(__name__)

#: Records read one by one before a learner that is behind jumps to the newest instead.
LONGEST_WALK = 64

#: Records between the one last seen and the newest that a learner which comes back reads, to check their
#: chain: some ten seconds of small requests. After a longer absence the newest one's signature speaks alone.
LONGEST_CHECK = 1_024


@dataclass(frozen=True)
class Commit:
    """A version of a fragment that was verified: its anchor, and the records read on the way to it.

    `attested_by` is the aggregators' key that attests the last record; None at version 0.
    """

    fragment: int
    version: int
    anchor: Mapping[str, TensorBytes] = field(repr=False)
    records: tuple[Record, ...] = field(repr=False)
    bytes_read: int = 0
    attested_by: bytes | None = None


class Follower:
    """Reads one run's history from the bucket. Used by one thread at a time.

    Looking changes nothing: a commit counts as followed once `advance` is told, after it was delivered.
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: RunPlan,
        history: History,
        backend: Backend,
        *,
        aggregator_key: bytes | None,
    ) -> None:
        self._store = store
        self._plan = plan
        self._history = history
        self._pinned = plan.manifest.aggregator_key or aggregator_key
        self._newest = [history.newest(fragment) for fragment in range(len(plan.fragments))]
        self._anchors = Anchors(store, plan, backend, self._known_record)
        #: Ends that were met, and the fragments whose end was verified.
        self._ends: dict[int, FragmentEnd] = {}
        self._ended: set[int] = set()

    @property
    def aggregator_key(self) -> bytes | None:
        """The key that attests this run's records, as far as it is known."""
        return self._pinned or self._history.aggregator_key

    @property
    def fragments(self) -> range:
        return range(len(self._newest))

    def has(self, fragment: int) -> bool:
        """Whether the run has this fragment."""
        return fragment < len(self._newest)

    def version(self, fragment: int) -> int:
        """The newest version followed."""
        return self._newest[fragment][0]

    def advance(self, commit: Commit) -> None:
        """The commit was delivered: the next look is for what follows it. StateUnavailable, ForkedHistory.

        In memory first: when the note on disk fails, `persist` makes up for it.
        """
        if commit.records:
            self._newest[commit.fragment] = (commit.version, commit.records[-1].sha256)
            self._pinned = self._pinned or commit.attested_by
        self._anchors.hold(commit.fragment, commit.version, commit.anchor)
        self.persist()

    def persist(self) -> None:
        """Notes on disk what was followed since the last note. Raises StateUnavailable."""
        for fragment, (version, record) in enumerate(self._newest):
            if version > self._history.newest(fragment)[0] and self._pinned is not None:
                self._history.follow(fragment, version, record, self._pinned)

    def genesis(self, fragment: int) -> Commit:
        """Version 0."""
        anchor, bytes_read = self._anchors.genesis(fragment)
        return Commit(fragment, 0, anchor, (), bytes_read)

    def catch_up(self, fragment: int) -> Commit:
        """The newest version in the bucket: what a learner that joins starts from. Raises ForkedHistory.

        A learner that was here before follows the chain from the record it saw last, up to LONGEST_CHECK.
        """
        seen, seen_record = self._newest[fragment]
        if seen:
            self._check_seen(fragment, seen, seen_record)
        newest = newest_version(self._store, self._plan.run, fragment, seen)
        while newest >= max(seen, 1):
            record = self._record(fragment, newest)
            attested_by = self._attest(record) if record is not None else None
            if record is not None and attested_by is not None:
                if seen:
                    self._check_chain(record, seen, seen_record)
                try:
                    anchor, bytes_read = self._anchors.read(fragment, [record])
                except GONE:
                    if self._record(fragment, newest + 1) is None:
                        raise
                    # Retention let it go meanwhile.
                    newest = newest_version(self._store, self._plan.run, fragment, newest)
                    continue
                return Commit(fragment, newest, anchor, (record,), bytes_read, attested_by)
            newest -= 1  # a record that nobody has attested yet is not to be followed yet
        if seen:
            raise ObjectMissing(attestation_key(self._plan.run, fragment, seen))
        return self.genesis(fragment)

    def next_commit(self, fragment: int, announced: Announced = UNKNOWN) -> Commit | None:
        """The newest attested version above the one seen, each record between verified; None: no news.

        Where the head was announced, the bucket is not asked for what comes after it. A learner that is far
        behind stops at every LONGEST_WALK versions, where the anchor is still kept.
        """
        seen, previous = self._newest[fragment]
        records: list[Record] = []
        proven: set[int] = set()
        while announced.through is None or seen + len(records) < announced.through:
            version = seen + len(records) + 1
            record = announced.record(self._plan, fragment, version, previous, self.aggregator_key)
            if record is not None:
                proven.add(version)
            else:
                record = self._record(fragment, version)
            if record is None:
                break
            check_link(record, previous)
            records.append(record)
            previous = record.sha256
            if len(records) % LONGEST_WALK == 0:
                with contextlib.suppress(*GONE):  # retention let that anchor go: a later one is kept
                    return self._commit(fragment, records, proven)
        return self._commit(fragment, records, proven)

    def _commit(self, fragment: int, records: list[Record], proven: set[int]) -> Commit | None:
        """The commit of the newest of these records that is attested, as the `proven` are; None: none is."""
        for count in range(len(records), 0, -1):
            record = records[count - 1]
            attested_by = self.aggregator_key if record.version in proven else self._attest(record)
            if attested_by is not None:
                walked = records[:count]
                anchor, bytes_read = self._anchors.read(fragment, walked)
                return Commit(fragment, walked[-1].version, anchor, tuple(walked), bytes_read, attested_by)
        return None

    def record_of_base(self, fragment: int, base: int) -> Record | None:
        """The record that closed the round with this base version, if the bucket has it."""
        return self._record(fragment, base + 1)

    def _record(self, fragment: int, version: int) -> Record | None:
        """The record; None when it is not there, as far as this learner can see. Notes an end met there."""
        try:
            found = self._slot(fragment, version)
        except (ObjectMissing, NotReadable):
            return None
        if isinstance(found, FragmentEnd):
            self._ends[fragment] = found
            return None
        return found

    def _known_record(self, fragment: int, version: int) -> Record:
        """The record of a version that was there. Raises ObjectMissing, NotReadable, ForkedHistory."""
        found = self._slot(fragment, version)
        if isinstance(found, FragmentEnd):
            raise ObjectMissing(record_key(self._plan.run, fragment, version))
        return found

    def _slot(self, fragment: int, version: int) -> Record | FragmentEnd:
        key = record_key(self._plan.run, fragment, version)
        found = read_slot(self._store.get(key, length=MAX_DOCUMENT_BYTES + 1).data)
        check_slot(self._plan, found, fragment, version)
        return found

    def end(self, fragment: int) -> FragmentEnd | None:
        """The fragment's end, if it was met where the next record would be, and is attested."""
        end = self._ends.get(fragment)
        version, sha256 = self._newest[fragment]
        if end is None or end.version != version + 1:
            return None
        if fragment not in self._ended:
            if end.previous != sha256:
                raise ForkedHistory(
                    f"the end of fragment {fragment} follows {end.previous.hex()[:16]}…, "
                    f"version {version} was {sha256.hex()[:16]}…"
                )
            if self._attest(end) is None:
                return None
            self._ended.add(fragment)
        return end

    def run_may_be_over(self) -> bool:
        """Whether there is an end marker: a hint to look at every fragment. Each end proves itself."""
        try:
            self._store.head(end_key(self._plan.run))
        except (ObjectMissing, NotReadable):
            return False
        return True

    def _check_seen(self, fragment: int, version: int, sha256: bytes) -> None:
        try:
            found = self._known_record(fragment, version).sha256
        except ObjectMissing:
            found = None
        if found != sha256:
            shown = found.hex()[:16] + "…" if found is not None else "none"
            raise ForkedHistory(
                f"fragment {fragment}: version {version} was seen with record {sha256.hex()[:16]}…, "
                f"the bucket now holds {shown}",
                hint="an older or altered copy of the bucket is being served",
            )

    def _check_chain(self, newest: Record, seen: int, seen_record: bytes) -> None:
        """ForkedHistory unless the records between lead from the one that was seen to `newest`."""
        if newest.version - seen > LONGEST_CHECK:
            facts = {"run": newest.run, "fragment": newest.fragment, "seen": seen, "newest": newest.version}
            logger.warning("chain_not_checked", extra=facts)
            return
        previous = seen_record
        for version in range(seen + 1, newest.version):
            try:
                record = self._known_record(newest.fragment, version)
            except ObjectMissing as error:
                raise HistoryError(
                    f"fragment {newest.fragment} has version {newest.version}, and no record of {version}",
                    hint="restore the record from a copy of the bucket",
                ) from error
            check_link(record, previous)
            previous = record.sha256
        if newest.version > seen:
            check_link(newest, previous)

    def _attest(self, record: Record | FragmentEnd) -> bytes | None:
        """The key whose attestation of the record verifies; None when there is no attestation yet."""
        key = attestation_key(self._plan.run, record.fragment, record.version)
        try:
            data = self._store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except (ObjectMissing, NotReadable):
            return None
        attestation = Attestation.from_bytes(data)
        attestation.verify(record.sha256, self.aggregator_key)
        return attestation.public_key
