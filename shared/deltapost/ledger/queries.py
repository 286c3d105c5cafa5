"""Questions people ask of a ledger, each one statement over bound parameters, in the caller's transaction.

Lists are newest first and bounded; rounds page by `sequence`, the order in which they were committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from deltapost.ledger.audit_view import RoundAudit
from deltapost.ledger.tables import (
    ContributionRow,
    FragmentRow,
    LearnerRow,
    ParticipantRow,
    RoundRow,
    RunRow,
    UnverifiedRow,
)

__all__ = [
    "LearnerSummary",
    "RoundStory",
    "RunSummary",
    "find_round",
    "find_run",
    "fragments_of",
    "learners_of",
    "rounds_of",
    "runs",
]

#: Envelopes of one round that are listed; its counts are whole all the same.
MAX_LISTED_ENVELOPES: Final = 1_000


@dataclass(frozen=True)
class RunSummary:
    """A run and how far it is. `rounds` counts committed rounds of all its fragments."""

    run: str
    state: str
    fragments: int
    learners: int
    rounds: int
    manifest_sha256: bytes
    aggregator_key: bytes | None
    created_at: datetime


@dataclass(frozen=True)
class LearnerSummary:
    """A learner, and what its merged contributions add up to (steps and tokens are its claims)."""

    learner: str
    public_key: bytes
    first_version: int
    local_step: int
    last_seen_at: datetime | None
    left: bool
    merged: int
    steps: int
    tokens: int
    bytes_in: int


@dataclass(frozen=True)
class RoundStory:
    """A round with everyone it merged (by learner id) and everything its record answered."""

    audit: RoundAudit
    row: RoundRow
    participants: Sequence[ParticipantRow]
    envelopes: Sequence[ContributionRow]
    unverified: Sequence[UnverifiedRow]


def _summaries() -> Select[str, str, int, int, int, bytes, bytes | None, datetime]:
    fragments = select(func.count()).where(FragmentRow.run == RunRow.run).scalar_subquery()
    learners = select(func.count()).where(LearnerRow.run == RunRow.run).scalar_subquery()
    return select(
        RunRow.run,
        RunRow.state,
        fragments,
        learners,
        RunRow.next_sequence - 1,
        RunRow.manifest_sha256,
        RunRow.aggregator_key,
        RunRow.created_at,
    )


def runs(session: Session) -> list[RunSummary]:
    """Every run, the one that was copied last first."""
    newest_first = _summaries().order_by(RunRow.created_at.desc(), RunRow.run)
    return [RunSummary(*row) for row in session.execute(newest_first)]


def find_run(session: Session, run: str) -> RunSummary | None:
    row = session.execute(_summaries().where(RunRow.run == run)).one_or_none()
    return None if row is None else RunSummary(*row)


def fragments_of(session: Session, run: str) -> Sequence[FragmentRow]:
    """The run's fragments by index: heads, owners, why one waits."""
    return session.scalars(
        select(FragmentRow).where(FragmentRow.run == run).order_by(FragmentRow.fragment)
    ).all()


def rounds_of(
    session: Session, run: str, *, fragment: int | None = None, before: int | None = None, limit: int
) -> Sequence[RoundAudit]:
    """Up to `limit` rounds with a `sequence` below `before`, newest first."""
    chosen = select(RoundAudit).where(RoundAudit.run == run)
    if fragment is not None:
        chosen = chosen.where(RoundAudit.fragment == fragment)
    if before is not None:
        chosen = chosen.where(RoundAudit.sequence < before)
    return session.scalars(chosen.order_by(RoundAudit.sequence.desc()).limit(limit)).all()


def find_round(session: Session, run: str, fragment: int, version: int) -> RoundStory | None:
    """The round that made `version` of the fragment; None when it is not committed."""
    key = {"run": run, "fragment": fragment, "version": version}
    row = session.get(RoundRow, key)
    if row is None:
        return None
    return RoundStory(
        audit=session.scalars(select(RoundAudit).filter_by(**key)).one(),
        row=row,
        participants=session.scalars(
            select(ParticipantRow).filter_by(**key).order_by(ParticipantRow.learner)
        ).all(),
        envelopes=session.scalars(
            select(ContributionRow)
            .filter_by(run=run, fragment=fragment, answered_version=version)
            .order_by(ContributionRow.learner, ContributionRow.version, ContributionRow.envelope)
            .limit(MAX_LISTED_ENVELOPES)
        ).all(),
        unverified=session.scalars(
            select(UnverifiedRow).filter_by(**key).order_by(UnverifiedRow.reason, UnverifiedRow.learner)
        ).all(),
    )


def learners_of(session: Session, run: str) -> list[LearnerSummary]:
    """The run's learners by id, with the totals of what rounds merged from them."""
    merged = (
        select(
            ParticipantRow.learner.label("learner"),
            func.count().label("rounds"),
            func.sum(ParticipantRow.steps).label("steps"),
            func.sum(ParticipantRow.tokens).label("tokens"),
            func.sum(ParticipantRow.payload_size).label("bytes_in"),
        )
        .where(ParticipantRow.run == run)
        .group_by(ParticipantRow.learner)
        .subquery()
    )
    chosen = (
        select(
            LearnerRow.learner,
            LearnerRow.public_key,
            LearnerRow.first_version,
            LearnerRow.local_step,
            LearnerRow.last_seen_at,
            LearnerRow.left,
            merged.c.rounds,
            merged.c.steps,
            merged.c.tokens,
            merged.c.bytes_in,
        )
        .outerjoin(merged, merged.c.learner == LearnerRow.learner)
        .where(LearnerRow.run == run)
        .order_by(LearnerRow.learner)
    )
    # Postgres sums integers to Decimal, and a learner that was never merged has NULLs.
    return [
        LearnerSummary(*row[:6], *(int(total or 0) for total in row[6:])) for row in session.execute(chosen)
    ]
