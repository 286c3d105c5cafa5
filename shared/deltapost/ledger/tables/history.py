"""Tables that index what records and attestations say: envelopes, rounds, participants, counts.

Hashes are 32 raw bytes, times are aware UTC, floats are finite: `ledger.columns` says how.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from deltapost.ledger.columns import (
    Detail,
    FiniteFloat,
    Metrics,
    UtcDateTime,
    at_least,
    cosine_range,
    finite,
    has_32_bytes,
    identifier,
    one_of,
)
from deltapost.ledger.tables.base import Base, Hash, Id
from deltapost.serialization.verdicts import UNVERIFIED_REASONS, VERDICTS, UnverifiedReason, Verdict


class ContributionRow(Base):
    """A verified envelope, by the SHA-256 of its frame, and what was decided about it.

    `version` is its base. History once answered_version (the version whose record lists it) is set: envelope,
    fragment, version, learner, verdict, answered_version. State before that, and always: message (the frame;
    NULL after a rebuild, as the counters may be), deliveries, entry_id and stream_epoch of its first
    delivery, detail, received_at.
    """

    __tablename__ = "contributions"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    envelope: Mapped[bytes] = mapped_column(Hash, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer)
    version: Mapped[int] = mapped_column(BigInteger)
    learner: Mapped[str] = mapped_column(Id)
    message: Mapped[bytes | None] = mapped_column(LargeBinary)
    payload_sha256: Mapped[bytes | None] = mapped_column(Hash)
    payload_size: Mapped[int | None] = mapped_column(BigInteger)
    local_step: Mapped[int | None] = mapped_column(BigInteger)
    steps: Mapped[int | None] = mapped_column(BigInteger)
    tokens: Mapped[int | None] = mapped_column(BigInteger)
    step_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    loss: Mapped[float | None] = mapped_column(FiniteFloat)
    metrics: Mapped[dict[str, float] | None] = mapped_column(Metrics)
    final: Mapped[bool | None] = mapped_column(Boolean(create_constraint=True, name="final_bool"))
    verdict: Mapped[Verdict] = mapped_column(Text)
    detail: Mapped[str | None] = mapped_column(Detail)
    deliveries: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    entry_id: Mapped[str | None] = mapped_column(Text)
    stream_epoch: Mapped[str | None] = mapped_column(Text)
    received_at: Mapped[datetime] = mapped_column(UtcDateTime)
    answered_version: Mapped[int | None] = mapped_column(BigInteger)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        identifier("learner"),
        has_32_bytes("envelope"),
        has_32_bytes("payload_sha256"),
        one_of("verdict", VERDICTS),
        *at_least(0, "version", "payload_size", "local_step", "steps", "tokens"),
        *at_least(1, "deliveries", "answered_version"),
        finite("step_seconds", minimum=">= 0"),
        finite("loss"),
        # One accepted contribution of a learner to a round: the second can only be a `conflict`.
        Index(
            "uq_contributions_accepted",
            "run",
            "fragment",
            "version",
            "learner",
            unique=True,
            sqlite_where=text("verdict = 'accepted'"),
            postgresql_where=text("verdict = 'accepted'"),
        ),
        Index(None, "run", "fragment", "answered_version"),
        Index(None, "run", "learner", "fragment", "version"),
    )


class UnverifiedRow(Base):
    """How many envelopes were only counted, by reason, for the record of `version`.

    `learner` is '' except for `over_quota`. History once that record exists; state (advice) before.
    """

    __tablename__ = "unverified"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    reason: Mapped[UnverifiedReason] = mapped_column(String(32), primary_key=True)
    learner: Mapped[str] = mapped_column(Id, primary_key=True, server_default=text("''"))
    count: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        identifier("learner", may_be_empty=True),
        one_of("reason", UNVERIFIED_REASONS),
        *at_least(1, "version", "count"),
    )


class RoundRow(Base):
    """A committed round, by the `version` it made. All history but `sequence`.

    From the record: version, generation, participants, degraded, cosine (mean over pairs; NULL below two),
    the hashes and sizes of what was written, bytes_in (sum of the merged payloads' sizes). From the
    attestation: quorum_, grace_, close_ and sync_seconds, owner, lease_epoch, committed_at. `sequence` is the
    order in which this ledger indexed the run's rounds, without gaps.
    """

    __tablename__ = "rounds"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    sequence: Mapped[int] = mapped_column(BigInteger)
    generation: Mapped[int] = mapped_column(Integer)
    record: Mapped[bytes] = mapped_column(LargeBinary)
    record_sha256: Mapped[bytes] = mapped_column(Hash)
    previous_sha256: Mapped[bytes] = mapped_column(Hash)
    attestation: Mapped[bytes] = mapped_column(LargeBinary)
    attestation_sha256: Mapped[bytes] = mapped_column(Hash)
    participants: Mapped[int] = mapped_column(Integer)
    degraded: Mapped[bool] = mapped_column(Boolean(create_constraint=True, name="degraded_bool"))
    cosine: Mapped[float | None] = mapped_column(FiniteFloat)
    anchor_sha256: Mapped[bytes | None] = mapped_column(Hash)
    anchor_size: Mapped[int | None] = mapped_column(BigInteger)
    outer_sha256: Mapped[bytes | None] = mapped_column(Hash)
    outer_size: Mapped[int | None] = mapped_column(BigInteger)
    update_sha256: Mapped[bytes | None] = mapped_column(Hash)
    update_size: Mapped[int | None] = mapped_column(BigInteger)
    bytes_in: Mapped[int] = mapped_column(BigInteger)
    quorum_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    grace_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    close_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    sync_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    owner: Mapped[str] = mapped_column(Text)
    lease_epoch: Mapped[int] = mapped_column(BigInteger)
    committed_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        UniqueConstraint("run", "sequence"),
        has_32_bytes("record_sha256"),
        has_32_bytes("previous_sha256"),
        has_32_bytes("attestation_sha256"),
        has_32_bytes("anchor_sha256"),
        has_32_bytes("outer_sha256"),
        has_32_bytes("update_sha256"),
        *at_least(0, "generation", "anchor_size", "outer_size", "update_size", "bytes_in", "lease_epoch"),
        *at_least(1, "version", "sequence", "participants"),
        cosine_range("cosine"),
        CheckConstraint("(participants < 2) = (cosine IS NULL)", name="cosine_needs_two"),
        finite("quorum_seconds", minimum=">= 0"),
        finite("grace_seconds", minimum=">= 0"),
        finite("close_seconds", minimum=">= 0"),
        finite("sync_seconds", minimum=">= 0"),
    )


class ParticipantRow(Base):
    """A contribution that the round of `version` merged. All history, all from the record.

    weight is the one used in the merge's mean before normalizing; norm is the delta's; cosine is with the
    merged delta. Counters, loss and metrics are the learner's claims.
    """

    __tablename__ = "participants"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    learner: Mapped[str] = mapped_column(Id, primary_key=True)
    envelope: Mapped[bytes] = mapped_column(Hash)
    payload_sha256: Mapped[bytes] = mapped_column(Hash)
    payload_size: Mapped[int] = mapped_column(BigInteger)
    local_step: Mapped[int] = mapped_column(BigInteger)
    steps: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)
    step_seconds: Mapped[float] = mapped_column(FiniteFloat)
    loss: Mapped[float | None] = mapped_column(FiniteFloat)
    metrics: Mapped[dict[str, float] | None] = mapped_column(Metrics)
    final: Mapped[bool] = mapped_column(Boolean(create_constraint=True, name="final_bool"))
    weight: Mapped[float] = mapped_column(FiniteFloat)
    norm: Mapped[float] = mapped_column(FiniteFloat)
    cosine: Mapped[float] = mapped_column(FiniteFloat)

    __table_args__ = (
        ForeignKeyConstraint(
            ["run", "fragment", "version"], ["rounds.run", "rounds.fragment", "rounds.version"]
        ),
        identifier("learner"),
        has_32_bytes("envelope"),
        has_32_bytes("payload_sha256"),
        *at_least(0, "payload_size", "local_step", "tokens"),
        *at_least(1, "steps"),
        finite("step_seconds", minimum=">= 0"),
        finite("loss"),
        finite("weight", minimum="> 0"),
        finite("norm", minimum=">= 0"),
        cosine_range("cosine"),
        Index(None, "run", "learner"),
    )
