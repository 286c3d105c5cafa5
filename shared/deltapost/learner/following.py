"""Following commits: from a version in the bucket to a verified anchor, by records, never by trust.

A record counts once the aggregators' attestation of it verifies. The anchor comes whole or, where that is
fewer bytes, as the chain of updates since the anchor held; either way its SHA-256 must be the record's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deltapost import codecs
from deltapost.adapters import Backend
from deltapost.algorithms.anchors import apply_update
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import AccessDenied, ForkedHistory, HistoryError, ObjectMissing
from deltapost.learner.history import History
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization import TensorBytes, pack, unpack_expected
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    genesis_key,
    record_key,
    update_key,
)
from deltapost.serialization.records import Attestation, Record
from deltapost.stores import ObjectStore

logger = logging.getLogger(__name__)

#: Records read one by one before a learner that is behind jumps to the newest instead.
LONGEST_WALK = 64


@dataclass(frozen=True)
class Commit:
    """A version of a fragment that was verified: its anchor, and the records read on the way to it."""

    fragment: int
    version: int
    anchor: Mapping[str, TensorBytes] = field(repr=False)
    records: tuple[Record, ...] = field(repr=False)
    bytes_read: int = 0


class Follower:
    """Reads one run's history from the bucket. Holds no connection of its own; not thread-safe."""

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
        self._backend = backend
        self._pinned = plan.manifest.aggregator_key or aggregator_key
        self._commit_codec = (
            codecs.get(plan.config.commit_dtype) if plan.config.commit_dtype is not None else None
        )
        self._anchors: dict[int, tuple[int, Mapping[str, TensorBytes]]] = {}

    @property
    def aggregator_key(self) -> bytes | None:
        """The key that attests this run's records, as far as it is known."""
        return self._pinned or self._history.aggregator_key

    def is_news(self, fragment: int, version: int) -> bool:
        """Whether `version` is above the newest one followed."""
        return 0 <= fragment < len(self._plan.fragments) and version > self._history.newest(fragment)[0]

    def genesis(self, fragment: int) -> Commit:
        """Version 0."""
        ref = self._plan.manifest.genesis[fragment]
        data = self._verified(genesis_key(self._plan.run, fragment, ref.sha256), ref)
        anchor = self._unpack_anchor(fragment, data)
        self._anchors[fragment] = (0, anchor)
        return Commit(fragment, 0, anchor, (), len(data))

    def catch_up(self, fragment: int) -> Commit:
        """The newest version in the bucket: what a learner that joins starts from. Raises ForkedHistory."""
        seen, seen_record = self._history.newest(fragment)
        if seen:
            self._check_seen(fragment, seen, seen_record)
        newest = self._newest_version(fragment, seen)
        while newest > seen:
            record = self._record(fragment, newest)
            if record is not None and self._attest(record):
                anchor, bytes_read = self._anchor(fragment, [record])
                return Commit(fragment, newest, anchor, (record,), bytes_read)
            newest -= 1  # a record that nobody has attested yet is not to be followed yet
        if seen:
            record = self._record(fragment, seen)
            if record is None:
                raise ObjectMissing(record_key(self._plan.run, fragment, seen))
            anchor, bytes_read = self._anchor(fragment, [record])
            return Commit(fragment, seen, anchor, (record,), bytes_read)
        return self.genesis(fragment)

    def next_commit(self, fragment: int) -> Commit | None:
        """The newest attested version above the one seen, each record between verified; None: no news."""
        seen, previous = self._history.newest(fragment)
        records: list[Record] = []
        for record in self._records_from(fragment, seen + 1):
            if record.previous != previous:
                raise ForkedHistory(
                    f"record {record.version} of fragment {fragment} follows "
                    f"{record.previous.hex()[:16]}…, version {record.version - 1} was {previous.hex()[:16]}…"
                )
            records.append(record)
            previous = record.sha256
            if len(records) >= LONGEST_WALK:
                break
        while records and not self._attest(records[-1]):
            records.pop()
        if not records:
            return None
        anchor, bytes_read = self._anchor(fragment, records)
        return Commit(fragment, records[-1].version, anchor, tuple(records), bytes_read)

    def record_of_base(self, fragment: int, base: int) -> Record | None:
        """The record that closed the round with this base version, if the bucket has it."""
        return self._record(fragment, base + 1)

    def _records_from(self, fragment: int, version: int) -> Iterator[Record]:
        while (record := self._record(fragment, version)) is not None:
            yield record
            version += 1

    def _record(self, fragment: int, version: int) -> Record | None:
        key = record_key(self._plan.run, fragment, version)
        try:
            data = self._store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except (ObjectMissing, AccessDenied):  # without LIST rights a store says 403 for "not there"
            return None
        record = Record.from_bytes(data)
        if (record.run, record.manifest, record.fragment, record.version) != (
            self._plan.run,
            self._plan.manifest_sha256,
            fragment,
            version,
        ):
            raise ForkedHistory(f"the object {key!r} is the record of another run, fragment or version")
        return record

    def _check_seen(self, fragment: int, version: int, sha256: bytes) -> None:
        record = self._record(fragment, version)
        if record is None or record.sha256 != sha256:
            found = record.sha256.hex()[:16] + "…" if record is not None else "none"
            raise ForkedHistory(
                f"fragment {fragment}: version {version} was seen with record {sha256.hex()[:16]}…, "
                f"the bucket now holds {found}",
                hint="an older or altered copy of the bucket is being served",
            )

    def _newest_version(self, fragment: int, known: int) -> int:
        """The highest version with a record, by doubling and halving: about 2·log₂(distance) requests."""
        low, step = known, 1
        while self._record(fragment, low + step) is not None:
            low, step = low + step, 2 * step
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self._record(fragment, middle) is not None:
                low = middle
            else:
                high = middle
        return low

    def _attest(self, record: Record) -> bool:
        """Verifies the record's attestation and notes the record as seen; False when there is none yet."""
        key = attestation_key(self._plan.run, record.fragment, record.version)
        try:
            data = self._store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except (ObjectMissing, AccessDenied):
            return False
        attestation = Attestation.from_bytes(data)
        attestation.verify(record.sha256, self.aggregator_key)
        self._history.follow(record.fragment, record.version, record.sha256, attestation.public_key)
        return True

    def _anchor(self, fragment: int, records: list[Record]) -> tuple[Mapping[str, TensorBytes], int]:
        """The anchor of the last record and the bytes it took to get it."""
        target = records[-1]
        chained = self._chain(fragment, records)
        if chained is not None:
            self._anchors[fragment] = (target.version, chained[0])
            return chained
        key = anchor_key(self._plan.run, fragment, target.base, target.anchor.sha256)
        data = self._verified(key, target.anchor)
        anchor = self._unpack_anchor(fragment, data)
        self._anchors[fragment] = (target.version, anchor)
        return anchor, len(data)

    def _chain(self, fragment: int, records: list[Record]) -> tuple[Mapping[str, TensorBytes], int] | None:
        """The anchor rebuilt from updates, where that is fewer bytes than the anchor itself."""
        held = self._anchors.get(fragment)
        updates = [record.update for record in records]
        if self._commit_codec is None or held is None or held[0] != records[0].base:
            return None
        sizes = [update.size for update in updates if update is not None]
        if len(sizes) < len(updates) or sum(sizes) >= records[-1].anchor.size:
            return None
        specs = self._plan.specs(fragment)
        expected = {e: kind for spec in specs for e, kind in self._commit_codec.entries(spec).items()}
        theta = held[1]
        for record, update in zip(records, updates, strict=True):
            assert update is not None
            key = update_key(self._plan.run, fragment, record.base, update.sha256)
            entries = unpack_expected(self._verified(key, update), expected)
            theta = apply_update(specs, theta, entries, self._commit_codec, self._backend)
        if hashlib.sha256(pack(theta)).digest() != records[-1].anchor.sha256:
            if self._backend.exact:
                raise HistoryError(
                    f"the updates of fragment {fragment} up to version {records[-1].version} do not lead "
                    "to the anchor its record names"
                )
            logger.info("update_chain_inexact", extra={"fragment": fragment, "backend": self._backend.name})
            return None
        return theta, sum(sizes)

    def _verified(self, key: str, ref: ObjectRef) -> bytes:
        blob = self._store.get(key, length=ref.size + 1)
        if blob.size != ref.size or hashlib.sha256(blob.data).digest() != ref.sha256:
            raise HistoryError(f"the object {key!r} does not have the bytes its record names")
        return blob.data

    def _unpack_anchor(self, fragment: int, data: bytes) -> Mapping[str, TensorBytes]:
        return unpack_expected(
            data, {spec.name: (spec.dtype, spec.shape) for spec in self._plan.specs(fragment)}
        )
