"""Anchors: a version's parameters from the bucket, by as few bytes as there are, verified by their hash.

A learner that holds a version takes the updates since; one that holds none takes the newest checkpoint's
anchor and the updates since that. The records between lead back from one that is attested, each by the hash
that the next one names, and the SHA-256 of what comes out must be the record's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from deltapost import codecs
from deltapost.adapters import Backend
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms.anchors import apply_update
from deltapost.algorithms.checkpoints import checkpoint_of
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import HistoryError, NotReadable, ObjectMissing
from deltapost.learner.chain import check_link
from deltapost.serialization import TensorBytes, pack, unpack_expected
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import anchor_key, genesis_key, update_key
from deltapost.serialization.records import Record
from deltapost.stores import ObjectStore

#: What a store says of an object that retention let go; without LIST rights, 403.
GONE: Final = (ObjectMissing, NotReadable)

Theta = Mapping[str, TensorBytes]


class Anchors:
    """Reads one run's anchors. `known_record` reads a record that is there, or raises."""

    def __init__(
        self,
        store: ObjectStore,
        plan: RunPlan,
        backend: Backend,
        known_record: Callable[[int, int], Record],
    ) -> None:
        self._store = store
        self._plan = plan
        #: Updates are added up exactly, or the hash would not be the record's: no inexact backend does it.
        self._backend = backend if backend.exact else NativeBackend()
        self._known_record = known_record
        self._codec = codecs.get(plan.config.commit_dtype) if plan.config.commit_dtype is not None else None
        self._held: dict[int, tuple[int, Theta]] = {}

    def hold(self, fragment: int, version: int, theta: Theta) -> None:
        """The learner's model holds this version now."""
        self._held[fragment] = (version, theta)

    def genesis(self, fragment: int) -> tuple[Theta, int]:
        """Version 0 and its bytes."""
        ref = self._plan.manifest.genesis[fragment]
        return self._whole(fragment, genesis_key(self._plan.run, fragment, ref.sha256), ref)

    def read(self, fragment: int, records: Sequence[Record]) -> tuple[Theta, int]:
        """The anchor of the last record and the bytes it took to get it.

        `records` is a chain whose last is attested. Raises ObjectMissing, NotReadable, HistoryError …
        """
        checkpoint = checkpoint_of(records[-1].version, self._plan.config.checkpoint_every)
        version, theta = self._held.get(fragment, (-1, {}))
        if self._codec is not None and version == records[0].base:
            after = [record for record in records if record.version > checkpoint]
            whole = records[-1].anchor.size if version < checkpoint else 0
            # From before the checkpoint it is the fewer bytes that count; after it there is only one way.
            if version >= checkpoint or _update_bytes(records) < whole + _update_bytes(after):
                with contextlib.suppress(*GONE):  # retention let an update go: a checkpoint is kept
                    return self._apply(fragment, theta, records)
        return self._from_checkpoint(fragment, checkpoint, records)

    def _from_checkpoint(
        self, fragment: int, checkpoint: int, records: Sequence[Record]
    ) -> tuple[Theta, int]:
        """The checkpoint's anchor, whole, and the updates since."""
        since = [record for record in records if record.version >= checkpoint]
        while since[0].version > max(checkpoint, 1):
            before = self._known_record(fragment, since[0].base)
            check_link(since[0], before.sha256)
            since.insert(0, before)
        if checkpoint == 0:
            theta, whole = self.genesis(fragment)
            moved, of_updates = self._apply(fragment, theta, since)
            return moved, whole + of_updates
        first = since[0]
        key = anchor_key(self._plan.run, fragment, first.base, first.anchor.sha256)
        theta, whole = self._whole(fragment, key, first.anchor)
        moved, of_updates = self._apply(fragment, theta, since[1:])
        return moved, whole + of_updates

    def _apply(self, fragment: int, theta: Theta, records: Sequence[Record]) -> tuple[Theta, int]:
        """The anchor that these rounds' updates lead to, and their bytes."""
        if not records:
            return theta, 0
        specs, codec, bytes_read = self._plan.specs(fragment), self._codec, 0
        assert codec is not None
        expected = {entry: kind for spec in specs for entry, kind in codec.entries(spec).items()}
        for record in records:
            if record.update is None:
                raise HistoryError(f"record {record.version} of fragment {fragment} names no update")
            key = update_key(self._plan.run, fragment, record.base, record.update.sha256)
            entries = unpack_expected(self._verified(key, record.update), expected)
            theta = apply_update(specs, theta, entries, codec, self._backend)
            bytes_read += record.update.size
        if hashlib.sha256(pack(theta)).digest() != records[-1].anchor.sha256:
            raise HistoryError(
                f"the updates of fragment {fragment} up to version {records[-1].version} do not lead "
                "to the anchor its record names"
            )
        return theta, bytes_read

    def _whole(self, fragment: int, key: str, ref: ObjectRef) -> tuple[Theta, int]:
        if ref.size > self._plan.max_anchor_bytes(fragment):
            raise HistoryError(f"the record of {key!r} names {ref.size} bytes, more than fit the schema")
        specs = self._plan.specs(fragment)
        data = self._verified(key, ref)
        return unpack_expected(data, {spec.name: (spec.dtype, spec.shape) for spec in specs}), len(data)

    def _verified(self, key: str, ref: ObjectRef) -> bytes:
        blob = self._store.get(key, length=ref.size + 1)
        if blob.size != ref.size or hashlib.sha256(blob.data).digest() != ref.sha256:
            raise HistoryError(f"the object {key!r} does not have the bytes its record names")
        return blob.data


def _update_bytes(records: Sequence[Record]) -> int:
    return sum(record.update.size for record in records if record.update is not None)
