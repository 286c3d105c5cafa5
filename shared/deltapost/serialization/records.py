"""Manifest, seal, record and attestation: the documents that make a run's history.

The chain: the record of version 1 names the manifest's SHA-256, each later one the SHA-256 of the record
before it in its fragment. A record holds facts only, so the same seal gives the same bytes anywhere; what
was merely observed (times, owner, stream positions) stands in the attestation, which signs both.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, field_validator

from deltapost.errors import MalformedMessage, SignatureRefused
from deltapost.limits import MAX_FRAGMENTS, MAX_NAME_LENGTH
from deltapost.serialization.documents import (
    FIRST_ERROR,
    FORMAT,
    Counter,
    Digest,
    Document,
    Id,
    Metrics,
    ObjectRef,
    PublicKey,
    Seconds,
    Signature,
    StepSeconds,
    few,
)
from deltapost.serialization.messages import ContributionMessage, Fragment, SignedMessage
from deltapost.serialization.schema import ParameterSpec, Schema
from deltapost.serialization.signing import SigningKey, verify
from deltapost.serialization.verdicts import UnverifiedReason, Verdict

Version = Annotated[int, Field(ge=1, le=2**53)]
Counts = Annotated[int, Field(ge=1, le=2**53)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class Parameter(Document):
    """One row of the manifest's schema."""

    name: Name
    dtype: Literal["F32", "F16", "BF16"]
    shape: Annotated[tuple[Counter, ...], FIRST_ERROR]


class Manifest(Document):
    """What a run is: fixed at its creation, create-once in the bucket, the root of every chain.

    `algorithm` is `DiLoCo.to_fields()`; `fragments` lists the parameter names of each; `genesis` the anchor
    of version 0 of each. `aggregator_key` pins who may attest, where the creator knew it.
    """

    format: Literal[1] = FORMAT
    arithmetic: Annotated[int, Field(ge=1)]
    run: Id
    parameters: Annotated[tuple[Parameter, ...], FIRST_ERROR]
    fragments: Annotated[
        tuple[Annotated[tuple[Name, ...], FIRST_ERROR], ...],
        Field(min_length=1, max_length=MAX_FRAGMENTS),
        FIRST_ERROR,
    ]
    genesis: Annotated[tuple[ObjectRef, ...], FIRST_ERROR]
    algorithm: dict[str, Any]
    admission: Literal["open", "registered"] = "open"
    creator_key: PublicKey
    aggregator_key: PublicKey | None = None

    @field_validator("genesis")
    @classmethod
    def _one_genesis_a_fragment(cls, value: tuple[ObjectRef, ...], info: Any) -> tuple[ObjectRef, ...]:
        if len(value) != len(info.data.get("fragments", ())):
            raise ValueError("one genesis anchor is needed for each fragment")
        return value

    @property
    def parameter_schema(self) -> Schema:
        return Schema(tuple(ParameterSpec(p.name, p.dtype, p.shape) for p in self.parameters))

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.to_bytes()).digest()


class Claim(Document):
    """An accepted contribution as its learner described it."""

    learner: Id
    envelope: Digest
    payload: ObjectRef
    local_step: Counter
    steps: Counter
    tokens: Counter
    step_seconds: StepSeconds
    loss: float | None
    metrics: Metrics
    final: bool

    @classmethod
    def of(cls, signed: SignedMessage) -> Claim:
        message = signed.message
        if not isinstance(message, ContributionMessage):
            raise MalformedMessage(f"a {message.kind} message makes no claim")
        return cls(
            envelope=signed.sha256,
            **message.model_dump(exclude={"kind", "run", "fragment", "version", "payload"}),
            payload=message.payload,
        )


class Answer(Document):
    """The verdict of an envelope that is not among the participants. `version` is its base."""

    envelope: Digest
    learner: Id
    version: Counter
    verdict: Verdict


class SealContent(Document):
    """What a seal fixes: from it and the payloads follow anchor, outer state and record, byte for byte."""

    run: Id
    fragment: Fragment
    version: Version
    generation: Counter
    claims: Annotated[tuple[Claim, ...], Field(min_length=1), FIRST_ERROR]
    answers: Annotated[tuple[Answer, ...], FIRST_ERROR]
    unverified: Annotated[dict[UnverifiedReason, Counts], BeforeValidator(few)]
    over_quota: dict[Id, Counts]
    degraded: bool


class MergedClaim(Claim):
    """A participant: its claim, its weight, its delta's L2 norm, and its cosine with the merged delta."""

    weight: Annotated[float, Field(gt=0.0)]
    norm: Annotated[float, Field(ge=0.0)]
    cosine: Annotated[float, Field(ge=-1.0, le=1.0)]


#: What the merge added to a claim.
_MERGE_FIELDS: Final = ("weight", "norm", "cosine")


class Record(Document):
    """The facts of a round. `version` is the one it produced; `previous` hashes the record before it.

    Anchor and outer state are named always; `checkpoint` says whether they are in the bucket. Where they are
    not, they follow from the newest checkpoint before and what was sealed since.
    """

    format: Literal[1] = FORMAT
    arithmetic: Annotated[int, Field(ge=1)]
    run: Id
    manifest: Digest
    fragment: Fragment
    version: Version
    previous: Digest
    generation: Counter
    degraded: bool
    participants: Annotated[tuple[MergedClaim, ...], Field(min_length=1), FIRST_ERROR]
    cosine: Annotated[float, Field(ge=-1.0, le=1.0)] | None
    answers: Annotated[tuple[Answer, ...], FIRST_ERROR]
    unverified: Annotated[dict[UnverifiedReason, Counts], BeforeValidator(few)]
    over_quota: dict[Id, Counts]
    checkpoint: bool
    anchor: ObjectRef
    outer: ObjectRef
    update: ObjectRef | None

    @property
    def base(self) -> int:
        return self.version - 1

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.to_bytes()).digest()

    def verdicts(self) -> dict[bytes, Verdict]:
        """Every envelope this record answers, with its verdict."""
        found: dict[bytes, Verdict] = {a.envelope: a.verdict for a in self.answers}
        found.update((p.envelope, "accepted") for p in self.participants)
        return found

    def seal_content(self) -> SealContent:
        """What the seal of this record fixed."""
        claims = tuple(
            Claim(**participant.model_dump(exclude={"payload", *_MERGE_FIELDS}), payload=participant.payload)
            for participant in self.participants
        )
        return SealContent(
            run=self.run,
            fragment=self.fragment,
            version=self.version,
            generation=self.generation,
            claims=claims,
            answers=self.answers,
            unverified=self.unverified,
            over_quota=self.over_quota,
            degraded=self.degraded,
        )

    def follows(self, seal: SealContent) -> bool:
        """Whether this record says what the seal fixed."""
        return self.seal_content() == seal


class Observations(Document):
    """What the owner saw while it committed: its own account, not part of the record."""

    owner: Annotated[str, Field(min_length=1, max_length=128)]
    lease_epoch: Counter
    stream_epoch: Annotated[str, Field(max_length=64)]
    position: Annotated[str, Field(max_length=64)]
    committed_at: str
    quorum_seconds: Seconds | None = None
    grace_seconds: Seconds | None = None
    close_seconds: Seconds | None = None
    sync_seconds: Seconds | None = None

    @field_validator("committed_at")
    @classmethod
    def _utc(cls, value: str) -> str:
        moment = datetime.fromisoformat(value)
        if moment.utcoffset() is None or moment.isoformat() != value:
            raise ValueError("not an ISO 8601 time with an offset")
        return value


class Attestation(Document):
    """The aggregators' signature over the hashes of a record and of the observations beside it."""

    format: Literal[1] = FORMAT
    record: Digest
    observations: bytes
    public_key: PublicKey
    signature: Signature

    @classmethod
    def make(cls, record_sha256: bytes, observations: Observations, key: SigningKey) -> Attestation:
        observed = observations.to_bytes()
        signature = key.sign("attestation", record_sha256 + hashlib.sha256(observed).digest())
        return cls(record=record_sha256, observations=observed, public_key=key.public, signature=signature)

    def verify(self, record_sha256: bytes, aggregator_key: bytes | None) -> Observations:
        """The observations, once everything fits. Raises SignatureRefused.

        `aggregator_key` is the pinned key; None accepts the key inside (first use: the caller pins it).
        """
        if self.record != record_sha256:
            raise SignatureRefused(
                f"the attestation is of record {self.record.hex()[:16]}…, "
                f"expected {record_sha256.hex()[:16]}…"
            )
        if aggregator_key is not None and self.public_key != aggregator_key:
            raise SignatureRefused(
                f"the attestation is by key {self.public_key.hex()[:16]}…, "
                f"the run's aggregator key is {aggregator_key.hex()[:16]}…"
            )
        signed = record_sha256 + hashlib.sha256(self.observations).digest()
        verify(self.public_key, "attestation", signed, self.signature, who="the run's aggregator")
        return Observations.from_bytes(self.observations)
