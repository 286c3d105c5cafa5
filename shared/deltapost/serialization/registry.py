"""Registry entries: who may speak for a learner id from which version on, as the run's creator signed it.

The entries of a run are numbered from 1, and each names the SHA-256 of the one before it (the first: the
manifest's). So the history of keys is read without a listing, by asking for the next number, and none of it
can be altered, left out or reordered without that being seen.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, field_validator

from deltapost.errors import ForkedHistory
from deltapost.limits import MAX_MESSAGE_BYTES, MAX_REGISTRY_ENTRIES
from deltapost.serialization.documents import FORMAT, Counter, Digest, Document, Id, PublicKey, Signature
from deltapost.serialization.names import registry_key
from deltapost.serialization.records import Manifest
from deltapost.serialization.signing import SigningKey, verify

KeyAction: TypeAlias = Literal["add", "rotate", "revoke"]
KEY_ACTIONS: Final[tuple[KeyAction, ...]] = ("add", "rotate", "revoke")


class KeyEntry(Document):
    """One change: from base version `from_version` of every fragment on, `public_key` speaks for `learner`.

    A `revoke` has no key: from then on nobody does. The key of a `rotate` counts at once beside the one that
    it replaces, which ends at `from_version`.
    """

    format: Literal[1] = FORMAT
    run: Id
    manifest: Digest
    number: Annotated[int, Field(ge=1, le=MAX_REGISTRY_ENTRIES)]
    previous: Digest
    action: KeyAction
    learner: Id
    public_key: PublicKey | None
    from_version: Counter

    @field_validator("public_key")
    @classmethod
    def _key_unless_revoked(cls, value: bytes | None, info: Any) -> bytes | None:
        if (value is None) != (info.data.get("action") == "revoke"):
            raise ValueError("add and rotate name a key, revoke names none")
        return value


class SignedKeyEntry(Document):
    """An entry as it lies in the bucket: its exact bytes, and the creator's signature over them."""

    entry: Annotated[bytes, Field(max_length=MAX_MESSAGE_BYTES)]
    signature: Signature

    @classmethod
    def make(cls, entry: KeyEntry, creator: SigningKey) -> SignedKeyEntry:
        data = entry.to_bytes()
        return cls(entry=data, signature=creator.sign("registry", data))

    @property
    def sha256(self) -> bytes:
        """What the next entry names as `previous`."""
        return hashlib.sha256(self.to_bytes()).digest()


def read_entry(data: bytes, manifest: Manifest, *, number: int, previous: bytes) -> KeyEntry:
    """The entry that follows `previous`, once everything fits.

    Raises MalformedMessage, SignatureRefused (another key than the creator's signed it), ForkedHistory (it
    continues something else).
    """
    signed = SignedKeyEntry.from_bytes(data, limit=2 * MAX_MESSAGE_BYTES)
    verify(manifest.creator_key, "registry", signed.entry, signed.signature, who="the run's creator")
    entry = KeyEntry.from_bytes(signed.entry)
    expected = (manifest.run, manifest.sha256, number, previous)
    if (entry.run, entry.manifest, entry.number, entry.previous) != expected:
        raise ForkedHistory(
            f"the entry {registry_key(manifest.run, number)!r} does not continue the ones before it",
            hint="an entry was replaced: the history of keys in the bucket is not the one its creator wrote",
        )
    return entry
