"""What the API answers, field by field. Hashes and keys are lowercase hex, times ISO 8601 in UTC."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _hex(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


Hex = Annotated[str, BeforeValidator(_hex)]


class _Model(BaseModel):
    model_config = ConfigDict(from_attributes=True, frozen=True)


class Healthy(_Model):
    """The process runs."""

    healthy: bool
    version: str


class Ready(_Model):
    """Whether requests can be answered, and if not, why, in words."""

    ready: bool
    reason: str


class Run(_Model):
    run: str
    state: str
    fragments: int
    learners: int
    rounds: int
    manifest_sha256: Hex
    aggregator_key: Hex | None
    created_at: datetime


class Runs(_Model):
    runs: list[Run]


class Fragment(_Model):
    """`head` is the newest committed version; `waiting_reason` says why a due round does not close."""

    fragment: int
    head: int
    head_sha256: Hex
    announced: int
    owner: str | None
    lease_expires_at: datetime | None
    waiting_reason: str | None
    updated_at: datetime | None


class RunDetail(Run):
    heads: list[Fragment]


class Round(_Model):
    """A row of the view `round_audit`."""

    run: str
    round: int
    fragment: int
    version: int
    sequence: int
    participants: int
    degraded: bool
    cosine: float | None
    accepted: int
    late: int
    rejected: int
    unverified: int
    quorum_seconds: float | None
    grace_seconds: float | None
    close_seconds: float | None
    sync_seconds: float | None
    bytes_in: int
    update_size: int | None
    anchor_size: int | None
    record_sha256: Hex
    committed_at: datetime


class Rounds(_Model):
    """Newest first. `next_before` is the `before` of the next page; null on the last one."""

    rounds: list[Round]
    next_before: int | None


class Participant(_Model):
    """A merged contribution. Steps, tokens, step_seconds, loss and metrics are the learner's claims."""

    learner: str
    envelope: Hex
    payload_sha256: Hex
    payload_size: int
    local_step: int
    steps: int
    tokens: int
    step_seconds: float
    loss: float | None
    metrics: dict[str, float] | None
    final: bool
    weight: float
    norm: float
    cosine: float


class Envelope(_Model):
    """A verified envelope and its verdict; `version` is its base, `deliveries` how often it came."""

    envelope: Hex
    learner: str
    version: int
    verdict: str
    detail: str | None
    deliveries: int
    received_at: datetime


class Unverified(_Model):
    """Envelopes that were only counted; `learner` is empty except for `over_quota`."""

    reason: str
    learner: str
    count: int


class RoundDetail(Round):
    """A round with everyone it merged and every envelope its record answered (the first 1,000)."""

    generation: int
    previous_sha256: Hex
    attestation_sha256: Hex
    anchor_sha256: Hex | None
    update_sha256: Hex | None
    outer_sha256: Hex | None
    outer_size: int | None
    owner: str
    lease_epoch: int
    merged: list[Participant]
    envelopes: list[Envelope]
    unverified_by_reason: list[Unverified]


class Learner(_Model):
    """`merged` counts the rounds that merged it; steps, tokens and bytes_in are their totals."""

    learner: str
    public_key: Hex
    first_version: int
    local_step: int
    last_seen_at: datetime | None
    left: bool
    merged: int
    steps: int
    tokens: int
    bytes_in: int


class Learners(_Model):
    learners: list[Learner]
