"""Tables of what is going on: runs, fragments, learners, aggregators, seals.

Hashes are 32 raw bytes, times are aware UTC, floats are finite: `ledger.columns` says how.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    Text,
    false,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from deltapost.ledger.columns import (
    Detail,
    UtcDateTime,
    at_least,
    has_32_bytes,
    identifier,
    one_of,
)
from deltapost.ledger.tables.base import RUN_STATES, Base, Hash, Id


class RunRow(Base):
    """A run that this ledger indexes.

    History: run, manifest, manifest_sha256, aggregator_key. State: state (`finished` once the end marker is
    in the bucket), next_sequence (what the run's next committed round gets), created_at (when it was copied),
    finish_requested_at (when somebody asked that it end).
    """

    __tablename__ = "runs"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    manifest: Mapped[bytes] = mapped_column(LargeBinary)
    manifest_sha256: Mapped[bytes] = mapped_column(Hash)
    aggregator_key: Mapped[bytes | None] = mapped_column(Hash)
    state: Mapped[str] = mapped_column(Text, server_default="active")
    next_sequence: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finish_requested_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

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
    started_position is where the present owner began to read, NULL once it gave the fragment back.
    """

    __tablename__ = "fragments"

    run: Mapped[str] = mapped_column(Id, ForeignKey("runs.run"), primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    head: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    head_sha256: Mapped[bytes] = mapped_column(Hash)
    stream_epoch: Mapped[str] = mapped_column(Text, server_default=text("''"))
    position: Mapped[str] = mapped_column(Text, server_default="0-0")
    owner: Mapped[str | None] = mapped_column(Text)
    lease_token: Mapped[str | None] = mapped_column(Text)
    lease_epoch: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    lease_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    announced: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    waiting_reason: Mapped[str | None] = mapped_column(Detail)
    updated_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    started_position: Mapped[str | None] = mapped_column(Text)

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

    name: Mapped[str] = mapped_column(Id, primary_key=True)
    token: Mapped[str] = mapped_column(Text)
    since: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)

    __table_args__ = (identifier("name"),)


class AggregatorRunRow(Base):
    """A run that an aggregator serves: what the fragments are shared out by. State throughout."""

    __tablename__ = "aggregator_runs"

    name: Mapped[str] = mapped_column(Id, ForeignKey("aggregators.name"), primary_key=True)
    run: Mapped[str] = mapped_column(Id, ForeignKey("runs.run"), primary_key=True)


class LearnerRow(Base):
    """A learner of a run.

    History: run, learner, public_key (the object `learners/ID`, or its first in `learner_keys`). State: all
    others. It counts for quorum from first_version on; (session, counter) is the largest seen, below which no
    message renews anything.
    """

    __tablename__ = "learners"

    run: Mapped[str] = mapped_column(Id, ForeignKey("runs.run"), primary_key=True)
    learner: Mapped[str] = mapped_column(Id, primary_key=True)
    public_key: Mapped[bytes] = mapped_column(Hash)
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


class SuspectRow(Base):
    """An entry, by the SHA-256 of its bytes, in whose reading so many starts of an owner ended.

    State throughout. The row goes once the entry was read; at limits.MAX_STARTS_AT_ENTRY it stays, and the
    entry is skipped wherever it stands.
    """

    __tablename__ = "suspects"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    entry: Mapped[bytes] = mapped_column(Hash, primary_key=True)
    starts: Mapped[int] = mapped_column(Integer)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        has_32_bytes("entry"),
        *at_least(1, "starts"),
    )


class SealRow(Base):
    """A generation of the seal of the round that makes `version`: canonical content, fixed before computing.

    State throughout: a record says what its winning seal said; the position lives and dies with the stream.
    A withdrawn one is out of force: its round was opened again. Its record may still win. record_sha256 is
    what an owner computed from it, noted before that record is written.
    """

    __tablename__ = "seals"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    generation: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    stream_epoch: Mapped[str] = mapped_column(Text)
    position: Mapped[str] = mapped_column(Text)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    content_sha256: Mapped[bytes] = mapped_column(Hash)
    degraded: Mapped[bool] = mapped_column(Boolean(create_constraint=True, name="degraded_bool"))
    withdrawn: Mapped[bool] = mapped_column(
        Boolean(create_constraint=True, name="withdrawn_bool"), server_default=false()
    )
    sealed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    record_sha256: Mapped[bytes | None] = mapped_column(Hash)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        has_32_bytes("content_sha256"),
        has_32_bytes("record_sha256"),
        *at_least(0, "generation"),
        *at_least(1, "version"),
    )
