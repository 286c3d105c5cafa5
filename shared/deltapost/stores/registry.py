"""A run's registry of learner keys in the bucket: read entry by entry, continued by its creator.

Failure modes. An entry that is not the creator's, or does not continue the ones before it, raises (see
`serialization.registry`) and nothing behind it is read; what was read before it stays. Two commands that
register at once cannot both write a number: the second reads the first's entry and goes on behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltapost.algorithms.key_history import KeyHistory
from deltapost.errors import ConfigurationError, MalformedMessage, NotReadable, ObjectConflict, ObjectMissing
from deltapost.limits import MAX_MESSAGE_BYTES, MAX_REGISTRY_ENTRIES
from deltapost.serialization.names import learner_key, registry_key
from deltapost.serialization.records import Manifest
from deltapost.serialization.registry import KeyAction, KeyEntry, SignedKeyEntry, read_entry
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore


@dataclass(frozen=True)
class StoredEntry:
    """An entry with the bytes it lies in the bucket with, and their SHA-256."""

    entry: KeyEntry
    data: bytes
    sha256: bytes

    @classmethod
    def read(cls, data: bytes, manifest: Manifest, *, number: int, previous: bytes) -> StoredEntry:
        """Raises MalformedMessage (naming the object), SignatureRefused, ForkedHistory."""
        try:
            entry = read_entry(data, manifest, number=number, previous=previous)
        except MalformedMessage as error:
            raise MalformedMessage(f"the object {registry_key(manifest.run, number)!r}: {error}") from None
        return cls(entry, data, SignedKeyEntry.from_bytes(data, limit=2 * MAX_MESSAGE_BYTES).sha256)


def entries_after(
    store: ObjectStore, manifest: Manifest, *, number: int, previous: bytes
) -> Iterator[StoredEntry]:
    """The entries behind `number`, whose hash is `previous`: one request each, and one for "no more"."""
    while number < MAX_REGISTRY_ENTRIES:
        number += 1
        try:
            data = store.get(registry_key(manifest.run, number), length=2 * MAX_MESSAGE_BYTES + 1).data
        except (ObjectMissing, NotReadable):
            return
        stored = StoredEntry.read(data, manifest, number=number, previous=previous)
        previous = stored.sha256
        yield stored


def read_on(store: ObjectStore, manifest: Manifest, history: KeyHistory) -> KeyHistory:
    """Brings `history` up to the bucket, and returns it."""
    for stored in entries_after(store, manifest, number=history.number, previous=history.head):
        history.add(stored.entry, stored.sha256)
    return history


def owner_key(store: ObjectStore, run: str, learner: str) -> bytes | None:
    """The key in `learners/ID`: who owns the id in an open run."""
    try:
        return store.get(learner_key(run, learner), length=33).data
    except (ObjectMissing, NotReadable):
        return None


def register(
    store: ObjectStore,
    manifest: Manifest,
    creator: SigningKey,
    action: KeyAction,
    learner: str,
    public_key: bytes | None,
    *,
    from_version: int,
) -> KeyEntry:
    """Appends an entry, signed by the run's creator.

    Raises ConfigurationError when `creator` is not the run's, or the action does not fit what is registered:
    only an id without a key can be added, only one with a key rotated or revoked, never before an earlier
    change of it.
    """
    if creator.public != manifest.creator_key:
        raise ConfigurationError(
            f"the key {creator.public.hex()[:16]}… did not create run {manifest.run!r}: "
            f"{manifest.creator_key.hex()[:16]}… did",
            hint="name the creator's key file with --creator-key-file",
        )
    history = KeyHistory(manifest)
    while True:
        read_on(store, manifest, history)
        _check(store, manifest, history, action, learner, public_key, from_version)
        if history.number >= MAX_REGISTRY_ENTRIES:
            raise ConfigurationError(
                f"run {manifest.run!r} has {history.number} registry entries: it is full"
            )
        entry = KeyEntry(
            run=manifest.run,
            manifest=manifest.sha256,
            number=history.number + 1,
            previous=history.head,
            action=action,
            learner=learner,
            public_key=public_key,
            from_version=from_version,
        )
        data = SignedKeyEntry.make(entry, creator).to_bytes()
        try:
            store.put(registry_key(manifest.run, entry.number), data)
        except ObjectConflict:
            continue  # another command was faster: what it wrote may change what is allowed
        return entry


def _check(
    store: ObjectStore,
    manifest: Manifest,
    history: KeyHistory,
    action: KeyAction,
    learner: str,
    public_key: bytes | None,
    from_version: int,
) -> None:
    who = f"learner {learner!r} of run {manifest.run!r}"
    known = history.entries(learner)
    newest = known[-1] if known else None
    present = newest.public_key if newest is not None else None
    if newest is None and manifest.admission == "open":
        present = owner_key(store, manifest.run, learner)
    if action == "add" and present is not None:
        raise ConfigurationError(
            f"{who} has the key {present.hex()[:16]}… already",
            hint=f"to replace it: deltapost learner rotate {manifest.run} {learner} NEW_KEY",
        )
    if action != "add" and present is None:
        raise ConfigurationError(
            f"{who} has no key to {action}", hint="see: deltapost learner list " + manifest.run
        )
    if public_key is not None and public_key == present:
        raise ConfigurationError(f"{who} has this very key already")
    if newest is not None and from_version < newest.from_version:
        raise ConfigurationError(
            f"{who} changes at version {newest.from_version} already, version {from_version} is before that",
            hint=f"use --from-version {newest.from_version} or later",
        )
