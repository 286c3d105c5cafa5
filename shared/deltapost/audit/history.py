"""BucketHistory: a run as its bucket tells it, each record verified before it is handed on.

A record counts once it continues the one before it in its fragment and the run's aggregator key attests it.
The key is the manifest's or, where that pins none, the create-once object `RUN/aggregator`.

Failure modes. What contradicts itself is HistoryError (or ForkedHistory, SignatureRefused, MalformedMessage),
naming the object. A store that does not answer is StoreUnavailable: nothing is concluded from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from deltapost.algorithms.checkpoints import check_checkpoint
from deltapost.algorithms.diloco import DiLoCo
from deltapost.errors import (
    ConfigurationError,
    ForkedHistory,
    HistoryError,
    MalformedMessage,
    ObjectMissing,
    SignatureRefused,
)
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.documents import Document
from deltapost.serialization.ends import FragmentEnd, read_slot
from deltapost.serialization.names import (
    aggregator_object_key,
    anchor_key,
    attestation_key,
    delta_key,
    learner_key,
    manifest_key,
    outer_key,
    parse_key,
    record_key,
    retention_key,
    update_key,
)
from deltapost.serialization.records import Attestation, Manifest, Observations, Record
from deltapost.serialization.retention import Released, RetentionNote
from deltapost.stores import ObjectStore

D = TypeVar("D", bound=Document)


@dataclass(frozen=True)
class Attested:
    """A record with the attestation that was verified against it, and what that observed."""

    record: Record
    sha256: bytes
    attestation: Attestation
    observations: Observations


@dataclass(frozen=True)
class Unattested:
    """A record that continues its chain and that nobody has attested yet."""

    record: Record


class BucketHistory:
    """Reads one run. Safe to use from several threads."""

    def __init__(self, store: ObjectStore, manifest: Manifest, aggregator_key: bytes | None) -> None:
        self.store = store
        self.manifest = manifest
        self.manifest_sha256 = manifest.sha256
        self.checkpoint_every = DiLoCo.from_fields(manifest.algorithm).checkpoint_every
        #: The run's key; None while no aggregator has served it: nothing can be attested then.
        self.aggregator_key = aggregator_key

    @classmethod
    def open(cls, store: ObjectStore, run: str) -> BucketHistory:
        """Reads the manifest and the run's key. Raises ConfigurationError when there is no such run."""
        try:
            manifest = _document(store, manifest_key(run), Manifest)
        except ObjectMissing as error:
            raise ConfigurationError(
                f"there is no run {run!r} in the store: {error}",
                hint="look at the run's id, and at the prefix in --store or DELTAPOST_STORE",
            ) from None
        if manifest.run != run:
            raise HistoryError(f"the object {manifest_key(run)!r} is the manifest of run {manifest.run!r}")
        pinned = manifest.aggregator_key
        if pinned is None:
            key = aggregator_object_key(run)
            try:
                pinned = store.get(key, length=33).data
            except ObjectMissing:
                return cls(store, manifest, None)
            if len(pinned) != 32:
                raise HistoryError(f"the object {key!r} holds no public key of 32 bytes")
        return cls(store, manifest, pinned)

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def fragments(self) -> int:
        return len(self.manifest.fragments)

    def versions(self, fragment: int) -> list[int]:
        """The versions that have a record, in order. Needs the right to list.

        The slot of a fragment's end is none of them: who owns the fragment adopts the end by itself.
        """
        prefix = record_key(self.run, fragment, 0).rpartition("/")[0] + "/"
        parsed = (parse_key(info.key) for info in self.store.list(prefix))
        found = [key.version for key in parsed if key is not None and key.version is not None]
        if found and self._ended_before(fragment, found[-1]):
            found.pop()
        return found

    def _ended_before(self, fragment: int, version: int) -> bool:
        try:
            data = self.store.get(record_key(self.run, fragment, version), length=MAX_DOCUMENT_BYTES + 1).data
            return isinstance(read_slot(data), FragmentEnd)
        except (ObjectMissing, MalformedMessage):
            return False  # `read` says what is wrong with it

    def learners(self) -> dict[str, bytes]:
        """Public key by learner id. Needs the right to list. Raises HistoryError: not 32 bytes."""
        found = {}
        for learner in self.learner_ids():
            key = learner_key(self.run, learner)
            found[learner] = self.store.get(key, length=33).data
            if len(found[learner]) != 32:
                raise HistoryError(f"the object {key!r} holds no public key of 32 bytes")
        return found

    def learner_ids(self) -> list[str]:
        """The ids that have a key, in order. Needs the right to list."""
        parsed = (parse_key(info.key) for info in self.store.list(learner_key(self.run, "x")[:-1]))
        return [key.learner for key in parsed if key is not None and key.learner is not None]

    def released(self, fragment: int) -> Released | None:
        """What retention let go of the fragment, by its newest note; None: nothing. Needs the right to list.

        Raises SignatureRefused for a note that the run's key did not sign, HistoryError for one of no record.
        """
        prefix = retention_key(self.run, fragment, 0).rpartition("/")[0] + "/"
        keys = [info.key for info in self.store.list(prefix) if parse_key(info.key) is not None]
        if not keys:
            return None
        note = _document(self.store, keys[-1], RetentionNote)
        try:
            released = note.verify(self.aggregator_key or b"")
        except SignatureRefused as error:
            raise SignatureRefused(f"the object {keys[-1]!r}: {error}") from None
        self.check_released(released, keys[-1])
        return released

    def check_released(self, released: Released, key: str) -> None:
        """Raises HistoryError unless the note under `key` is about a record of this run."""
        found = self.read(released.fragment, released.through)
        expected = (
            self.run,
            self.manifest_sha256,
            retention_key(self.run, released.fragment, released.through),
        )
        if (
            (released.run, released.manifest, key) != expected
            or not isinstance(found, Attested)
            or found.sha256 != released.record
            or not found.record.checkpoint
        ):
            raise HistoryError(f"the object {key!r} lets go of a history that is not this run's")

    def ended(self, fragment: int, version: int) -> bool:
        """Whether the slot of this version holds the fragment's end."""
        key = record_key(self.run, fragment, version)
        try:
            return isinstance(read_slot(self.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data), FragmentEnd)
        except ObjectMissing:
            return False

    def read(self, fragment: int, version: int) -> Attested | Unattested | None:
        """The record of this version with its attestation; None: definitely no record, or the fragment's end.

        Verifies everything but `previous`, which `check_chain` does with what came before.
        """
        key = record_key(self.run, fragment, version)
        try:
            data = self.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except ObjectMissing:
            return None
        try:
            record = read_slot(data)
        except MalformedMessage as error:
            raise MalformedMessage(f"the object {key!r}: {error}") from None
        if isinstance(record, FragmentEnd):
            return None
        expected = (self.run, self.manifest_sha256, fragment, version)
        if (record.run, record.manifest, record.fragment, record.version) != expected:
            raise ForkedHistory(f"the object {key!r} is the record of another run, fragment or version")
        check_checkpoint(record, self.checkpoint_every)
        return self._attested(record)

    def _attested(self, record: Record) -> Attested | Unattested:
        key = attestation_key(self.run, record.fragment, record.version)
        try:
            attestation = _document(self.store, key, Attestation)
        except ObjectMissing:
            return Unattested(record)
        if self.aggregator_key is None:
            raise SignatureRefused(
                f"the object {key!r} is by key {attestation.public_key.hex()[:16]}…, and the run has no key",
                hint=f"restore the object {aggregator_object_key(self.run)!r} from a copy of the bucket",
            )
        sha256 = record.sha256
        try:
            observations = attestation.verify(sha256, self.aggregator_key)
        except (SignatureRefused, MalformedMessage) as error:
            raise type(error)(f"the object {key!r}: {error}") from None
        return Attested(record, sha256, attestation, observations)

    def check_chain(self, record: Record, previous: bytes) -> None:
        """Raises ForkedHistory unless the record continues the one with the hash `previous`."""
        if record.previous != previous:
            raise ForkedHistory(
                f"the record {record_key(self.run, record.fragment, record.version)!r} follows "
                f"{record.previous.hex()[:16]}…, the one before it is {previous.hex()[:16]}…",
                hint="one of the two was altered: compare both with a copy of the bucket",
            )


def objects_of(record: Record) -> frozenset[str]:
    """The keys of everything that the record says is there: its inputs and what it made of them."""
    run, fragment, base = record.run, record.fragment, record.base
    keys = {
        delta_key(run, participant.learner, fragment, base, participant.payload.sha256)
        for participant in record.participants
    }
    if record.checkpoint:
        keys.add(anchor_key(run, fragment, base, record.anchor.sha256))
        keys.add(outer_key(run, fragment, base, record.outer.sha256))
    if record.update is not None:
        keys.add(update_key(run, fragment, base, record.update.sha256))
    return frozenset(keys)


def _document(store: ObjectStore, key: str, kind: type[D]) -> D:
    """The document under the key. Raises ObjectMissing, and MalformedMessage naming the key."""
    data = store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
    try:
        return kind.from_bytes(data)
    except MalformedMessage as error:
        raise MalformedMessage(f"the object {key!r}: {error}") from None
