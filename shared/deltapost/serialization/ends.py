"""Ends: what stands in a fragment's next record slot, and in `RUN/end`, once a run is finished.

The end of a fragment takes the create-once key of the record that would come next, so of a last round and the
end one wins, whoever writes it. It answers what was still open: nothing of it is merged.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field

from deltapost.errors import MalformedMessage
from deltapost.limits import MAX_DOCUMENT_BYTES, MAX_FRAGMENTS
from deltapost.serialization.documents import (
    FORMAT,
    Digest,
    Document,
    Id,
    PublicKey,
    Signature,
    decode_plain,
)
from deltapost.serialization.messages import Fragment
from deltapost.serialization.records import Answer, Counts, Record, Version
from deltapost.serialization.signing import SigningKey, verify
from deltapost.serialization.verdicts import UnverifiedReason, Verdict


class FragmentEnd(Document):
    """The end of a fragment at head `version` - 1, whose record has the hash `previous`."""

    kind: Literal["end"] = "end"
    format: Literal[1] = FORMAT
    run: Id
    manifest: Digest
    fragment: Fragment
    version: Version
    previous: Digest
    answers: tuple[Answer, ...]
    unverified: dict[UnverifiedReason, Counts]
    over_quota: dict[Id, Counts]

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.to_bytes()).digest()

    def verdicts(self) -> dict[bytes, Verdict]:
        """Every envelope this end answers, with its verdict."""
        return {answer.envelope: answer.verdict for answer in self.answers}


class EndRef(Document):
    """A fragment's end: the version whose slot it takes, and its hash."""

    version: Version
    sha256: Digest


class RunEnd(Document):
    """All fragments of the run have ended, each at its version. Signed by the aggregators' key."""

    format: Literal[1] = FORMAT
    run: Id
    manifest: Digest
    ends: Annotated[tuple[EndRef, ...], Field(min_length=1, max_length=MAX_FRAGMENTS)]
    public_key: PublicKey
    signature: Signature

    @classmethod
    def make(cls, run: str, manifest: bytes, ends: tuple[EndRef, ...], key: SigningKey) -> RunEnd:
        unsigned = cls(run=run, manifest=manifest, ends=ends, public_key=key.public, signature=bytes(64))
        signature = key.sign("end", unsigned.to_bytes())
        return unsigned.model_copy(update={"signature": signature})

    def verify(self, aggregator_key: bytes) -> None:
        """Raises SignatureRefused unless the holder of the run's aggregator key signed it."""
        unsigned = self.model_copy(update={"signature": bytes(64)})
        verify(aggregator_key, "end", unsigned.to_bytes(), self.signature, who="the run's aggregator")


def read_slot(data: bytes) -> Record | FragmentEnd:
    """What a record's key holds. Raises MalformedMessage."""
    plain = decode_plain(data, what="Record", limit=MAX_DOCUMENT_BYTES)
    if isinstance(plain, dict) and plain.get("kind") == "end":
        return FragmentEnd.from_plain(plain, data)
    if not isinstance(plain, dict):
        raise MalformedMessage("Record: not a map")
    return Record.from_plain(plain, data)
