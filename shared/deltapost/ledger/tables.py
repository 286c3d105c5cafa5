"""The ledger's tables: an index of what the bucket's records and attestations say, and the protocol's state.

*History* columns are fixed by a record or its attestation: they can be rebuilt from the bucket, and the
audit compares them with it. *State* columns are what the aggregators are doing now, or advice until a
record answers.

Hashes are 32 raw bytes, times are aware UTC, floats are finite: `ledger.columns` says how. The schema is
created by `deltapost.migrations` only; a test holds it equal to these classes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

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
from deltapost.limits import MAX_ID_LENGTH
from deltapost.serialization.verdicts import UNVERIFIED_REASONS, VERDICTS, UnverifiedReason, Verdict

__all__ = [
    "NAMING_CONVENTION",
    "RUN_STATES",
    "AggregatorRow",
    "AggregatorRunRow",
    "Base",
    "ContributionRow",
    "FragmentRow",
    "LearnerRow",
    "ParticipantRow",
    "RoundRow",
    "RunRow",
    "SealRow",
    "UnverifiedRow",
]

NAMING_CONVENTION: Final = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

RUN_STATES: Final = ("active", "paused", "finished")

_Id: Final = String(MAX_ID_LENGTH)
_Hash: Final = LargeBinary(32)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class RunRow(Base):
    """A run that this ledger indexes.

    History: run, manifest, manifest_sha256, aggregator_key. State: state (`finished` once the end marker is
    in the bucket), next_sequence (what the run's next committed round gets), created_at (when it was copied).
    """

    __tablename__ = "runs"

    run: Mapped[str] = mapped_column(_Id, primary_key=True)
    manifest: Mapped[bytes] = mapped_column(LargeBinary)
    manifest_sha256: Mapped[bytes] = mapped_column(_Hash)
    aggregator_key: Mapped[bytes | None] = mapped_column(_Hash)
    state: Mapped[str] = mapped_column(Text, server_default="active")
    next_sequence: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (
        identifier("run"),
        has_32_bytes("manifest_sha256"),
        has_32_bytes("aggregator_key"),
        one_of("state", RUN_STATES),
        *at_least(1, "next_sequence"),
    )


class FragmentRow(Base):
    """Where a fragment stands and who owns it.

    History: head and head_sha256 (the newest record's, or the manifest's at head 0). State: all others.
    Positions count only together with stream_epoch, which is '' while unknown. lease_token is drawn at each
    acquisition and fences every transaction; lease_epoch only counts acquisitions. announced is the newest
    version that was put on the commits stream; waiting_reason says why a due round does not close.
    """

    __tablename__ = "fragments"

    run: Mapped[str] = mapped_column(_Id, ForeignKey("runs.run"), primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    head: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    head_sha256: Mapped[bytes] = mapped_column(_Hash)
    stream_epoch: Mapped[str] = mapped_column(Text, server_default=text("''"))
    position: Mapped[str] = mapped_column(Text, server_default="0-0")
    owner: Mapped[str | None] = mapped_column(Text)
    lease_token: Mapped[str | None] = mapped_column(Text)
    lease_epoch: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    lease_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    announced: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    waiting_reason: Mapped[str | None] = mapped_column(Detail)
    updated_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

    __table_args__ = (
        *at_least(0, "fragment", "head", "lease_epoch", "announced"),
        has_32_bytes("head_sha256"),
        CheckConstraint("length(position) > 0", name="position_length"),
    )


class AggregatorRow(Base):
    """A living aggregator, by its name. State throughout.

    The process that drew `token` bears the name until expires_at, which it keeps moving on; since when is
    `since`.
    """

    __tablename__ = "aggregators"

    name: Mapped[str] = mapped_column(_Id, primary_key=True)
    token: Mapped[str] = mapped_column(Text)
    since: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (identifier("name"),)


class AggregatorRunRow(Base):
    """A run that an aggregator serves: what the fragments are shared out by. State throughout."""

    __tablename__ = "aggregator_runs"

    name: Mapped[str] = mapped_column(_Id, ForeignKey("aggregators.name"), primary_key=True)
    run: Mapped[str] = mapped_column(_Id, ForeignKey("runs.run"), primary_key=True)


class LearnerRow(Base):
    """A learner of a run.

    History: run, learner, public_key (the object `learners/ID`). State: all others. It counts for quorum from
    first_version on; (session, counter) is the largest seen, below which no message renews anything.
    """

    __tablename__ = "learners"

    run: Mapped[str] = mapped_column(_Id, ForeignKey("runs.run"), primary_key=True)
    learner: Mapped[str] = mapped_column(_Id, primary_key=True)
    public_key: Mapped[bytes] = mapped_column(_Hash)
    first_version: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    session: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    counter: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    local_step: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    last_seen_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    left: Mapped[bool] = mapped_column(
        Boolean(create_constraint=True, name="left_bool"), server_default=false()
    )

    __table_args__ = (
        identifier("learner"),
        has_32_bytes("public_key"),
        *at_least(0, "first_version", "session", "counter", "local_step"),
    )


class ContributionRow(Base):
    """A verified envelope, by the SHA-256 of its frame, and what was decided about it.

    `version` is its base. History once answered_version (the version whose record lists it) is set: envelope,
    fragment, version, learner, verdict, answered_version. State before that, and always: message (the frame;
    NULL after a rebuild, as the counters may be), deliveries, entry_id and stream_epoch of its first
    delivery, detail, received_at.
    """

    __tablename__ = "contributions"

    run: Mapped[str] = mapped_column(_Id, primary_key=True)
    envelope: Mapped[bytes] = mapped_column(_Hash, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer)
    version: Mapped[int] = mapped_column(BigInteger)
    learner: Mapped[str] = mapped_column(_Id)
    message: Mapped[bytes | None] = mapped_column(LargeBinary)
    payload_sha256: Mapped[bytes | None] = mapped_column(_Hash)
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

    run: Mapped[str] = mapped_column(_Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    reason: Mapped[UnverifiedReason] = mapped_column(String(32), primary_key=True)
    learner: Mapped[str] = mapped_column(_Id, primary_key=True, server_default=text("''"))
    count: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        identifier("learner", may_be_empty=True),
        one_of("reason", UNVERIFIED_REASONS),
        *at_least(1, "version", "count"),
    )


class SealRow(Base):
    """A generation of the seal of the round that makes `version`: canonical content, fixed before computing.

    State throughout: a record says what its winning seal said; the position lives and dies with the stream.
    A withdrawn one is out of force: its round was opened again. Its record may still win.
    """

    __tablename__ = "seals"

    run: Mapped[str] = mapped_column(_Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    stream_epoch: Mapped[str] = mapped_column(Text)
    position: Mapped[str] = mapped_column(Text)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    content_sha256: Mapped[bytes] = mapped_column(_Hash)
    degraded: Mapped[bool] = mapped_column(Boolean(create_constraint=True, name="degraded_bool"))
    withdrawn: Mapped[bool] = mapped_column(
        Boolean(create_constraint=True, name="withdrawn_bool"), server_default=false()
    )
    sealed_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        has_32_bytes("content_sha256"),
        *at_least(0, "generation"),
        *at_least(1, "version"),
    )


class RoundRow(Base):
    """A committed round, by the `version` it made. All history but `sequence`.

    From the record: version, generation, participants, degraded, cosine (mean over pairs; NULL below two),
    the hashes and sizes of what was written, bytes_in (sum of the merged payloads' sizes). From the
    attestation: quorum_, grace_, close_ and sync_seconds, owner, lease_epoch, committed_at. `sequence` is the
    order in which this ledger indexed the run's rounds, without gaps.
    """

    __tablename__ = "rounds"

    run: Mapped[str] = mapped_column(_Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    sequence: Mapped[int] = mapped_column(BigInteger)
    generation: Mapped[int] = mapped_column(Integer)
    record: Mapped[bytes] = mapped_column(LargeBinary)
    record_sha256: Mapped[bytes] = mapped_column(_Hash)
    previous_sha256: Mapped[bytes] = mapped_column(_Hash)
    attestation: Mapped[bytes] = mapped_column(LargeBinary)
    attestation_sha256: Mapped[bytes] = mapped_column(_Hash)
    participants: Mapped[int] = mapped_column(Integer)
    degraded: Mapped[bool] = mapped_column(Boolean(create_constraint=True, name="degraded_bool"))
    cosine: Mapped[float | None] = mapped_column(FiniteFloat)
    anchor_sha256: Mapped[bytes | None] = mapped_column(_Hash)
    anchor_size: Mapped[int | None] = mapped_column(BigInteger)
    outer_sha256: Mapped[bytes | None] = mapped_column(_Hash)
    outer_size: Mapped[int | None] = mapped_column(BigInteger)
    update_sha256: Mapped[bytes | None] = mapped_column(_Hash)
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

    run: Mapped[str] = mapped_column(_Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    learner: Mapped[str] = mapped_column(_Id, primary_key=True)
    envelope: Mapped[bytes] = mapped_column(_Hash)
    payload_sha256: Mapped[bytes] = mapped_column(_Hash)
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
