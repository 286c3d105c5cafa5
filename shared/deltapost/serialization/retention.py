"""Retention: the signed note that says which rounds' objects were let go on purpose.

It lies beside the records, create-once, and is written before the first object of its span is deleted: so a
missing object is either covered by such a note, or somebody else took it. Records and attestations stay.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field

from deltapost.errors import SignatureRefused
from deltapost.serialization.documents import FORMAT, Digest, Document, Id, PublicKey, Signature
from deltapost.serialization.messages import Fragment
from deltapost.serialization.records import Version
from deltapost.serialization.signing import SigningKey, verify


class Released(Document):
    """What is let go: of one fragment, what only the rounds up to and including version `through` need.

    These are the deltas and updates of the rounds that made versions 1 to `through`, and anchor and outer
    state of the versions before `through`: the state of `through` itself starts the first round that is kept.
    `record` is the hash of that version's record, `policy` what the operator asked for.
    """

    format: Literal[1] = FORMAT
    run: Id
    manifest: Digest
    fragment: Fragment
    through: Version
    record: Digest
    policy: Annotated[str, Field(min_length=1, max_length=64)]

    def covers(self, area: str, base: int) -> bool:
        """Whether the object of this area and base version may be gone."""
        match area:
            case "deltas" | "updates":
                return base + 1 <= self.through
            case "anchors" | "outer":
                return base + 1 < self.through
        return False


class RetentionNote(Document):
    """A `Released` with the signature of the run's aggregators over its canonical bytes."""

    released: Released
    public_key: PublicKey
    signature: Signature

    @classmethod
    def make(cls, released: Released, key: SigningKey) -> RetentionNote:
        signature = key.sign("retention", hashlib.sha256(released.to_bytes()).digest())
        return cls(released=released, public_key=key.public, signature=signature)

    def verify(self, aggregator_key: bytes) -> Released:
        """What was let go, once the run's key signed it. Raises SignatureRefused."""
        if self.public_key != aggregator_key:
            raise SignatureRefused(
                f"the retention note is by key {self.public_key.hex()[:16]}…, "
                f"the run's aggregator key is {aggregator_key.hex()[:16]}…"
            )
        signed = hashlib.sha256(self.released.to_bytes()).digest()
        verify(self.public_key, "retention", signed, self.signature, who="the run's aggregator")
        return self.released
