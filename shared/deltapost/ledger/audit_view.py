"""The view `round_audit`: one row per committed round, for people, dashboards and their own SQL."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Boolean, Integer, MetaData, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from deltapost.ledger.columns import FiniteFloat, UtcDateTime
from deltapost.limits import MAX_ID_LENGTH

__all__ = ["RoundAudit"]


class _ViewBase(DeclarativeBase):
    # Its own metadata: a view is no table, so the comparison of tables.py with the database must not see it.
    metadata = MetaData()


class RoundAudit(_ViewBase):
    """A round at a glance. Created by the migrations; read only.

    `round` is the display number (version - 1)·P + fragment. accepted, late (with stale) and rejected count
    the verified envelopes that the round's record answered; unverified counts those it could only count.
    record_sha256 is lowercase hex, as the bucket's tools print it.
    """

    __tablename__ = "round_audit"

    run: Mapped[str] = mapped_column(String(MAX_ID_LENGTH), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger)
    participants: Mapped[int] = mapped_column(Integer)
    degraded: Mapped[bool] = mapped_column(Boolean)
    cosine: Mapped[float | None] = mapped_column(FiniteFloat)
    accepted: Mapped[int] = mapped_column(BigInteger)
    late: Mapped[int] = mapped_column(BigInteger)
    rejected: Mapped[int] = mapped_column(BigInteger)
    unverified: Mapped[int] = mapped_column(BigInteger)
    quorum_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    grace_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    close_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    sync_seconds: Mapped[float | None] = mapped_column(FiniteFloat)
    bytes_in: Mapped[int] = mapped_column(BigInteger)
    update_size: Mapped[int | None] = mapped_column(BigInteger)
    anchor_size: Mapped[int | None] = mapped_column(BigInteger)
    record_sha256: Mapped[str] = mapped_column(Text)
    committed_at: Mapped[datetime] = mapped_column(UtcDateTime)
