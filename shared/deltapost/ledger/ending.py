"""The end of a run in the ledger: who asked for it, which fragments have ended, and what that answered.

The request is a state of the ledger; the ends are history, indexed from the bucket like records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, update

from deltapost.errors import ForkedHistory, LeaseLost, LedgerError
from deltapost.ledger.counting import Counts, count_rows, counts_for
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.rewinding import drop_unanswered
from deltapost.ledger.runs import Standing, finishing
from deltapost.ledger.tables import ContributionRow, FragmentEndRow, FragmentRow, RunRow, UnverifiedRow
from deltapost.ledger.writing import insert_missing, upsert
from deltapost.serialization.ends import EndRef, FragmentEnd
from deltapost.serialization.records import Answer, Attestation
from deltapost.serialization.verdicts import Verdict


def request(ledger: Ledger, run: str) -> str:
    """Asks that the run end; its state. Asking again changes nothing. Raises LedgerError: no such run."""
    with ledger.write() as session:
        row = session.get(RunRow, run)
        if row is None:
            raise LedgerError(f"this ledger has no run {run!r}", hint="see: deltapost run list")
        if row.finish_requested_at is None:
            row.finish_requested_at = ledger.now(session)
        return row.state


def requested(ledger: Ledger, run: str) -> bool:
    """Whether somebody asked that the run end."""
    with ledger.read() as session:
        return bool(session.scalars(select(finishing(run))).one())


def state(ledger: Ledger, run: str) -> str | None:
    """`active`, `finished` …; None for a run that is not here."""
    with ledger.read() as session:
        return session.scalars(select(RunRow.state).where(RunRow.run == run)).one_or_none()


def ends(ledger: Ledger, run: str) -> dict[int, EndRef]:
    """The run's fragments that have ended."""
    with ledger.read() as session:
        rows: Sequence[Any] = session.execute(
            select(FragmentEndRow.fragment, FragmentEndRow.version, FragmentEndRow.end_sha256).where(
                FragmentEndRow.run == run
            )
        ).all()
    return {fragment: EndRef(version=version, sha256=sha256) for fragment, version, sha256 in rows}


def unanswered(ledger: Ledger, run: str, fragment: int) -> list[Answer]:
    """What the fragment's end has to answer: accepted contributions come too late now."""
    with ledger.read() as session:
        rows: Sequence[Any] = session.execute(
            select(
                ContributionRow.envelope,
                ContributionRow.learner,
                ContributionRow.version,
                ContributionRow.verdict,
            )
            .where(
                ContributionRow.run == run,
                ContributionRow.fragment == fragment,
                ContributionRow.answered_version.is_(None),
            )
            .order_by(ContributionRow.envelope)
        ).all()
    return [
        Answer(envelope=envelope, learner=learner, version=version, verdict=_final(verdict))
        for envelope, learner, version, verdict in rows
    ]


def _final(verdict: Verdict) -> Verdict:
    return "late" if verdict == "accepted" else verdict


def counts(ledger: Ledger, run: str, fragment: int, version: int) -> Counts:
    """What was only counted since the last record."""
    with ledger.read() as session:
        return counts_for(session, run, fragment, version)


def index(ledger: Ledger, lease: Lease, before: Standing, end: FragmentEnd, attestation: Attestation) -> None:
    """Writes the end and the verdicts it gives; what it does not answer is forgotten, as nothing will.

    Raises LeaseLost when another owner went on, ForkedHistory when the end does not continue the head.
    """
    data = end.to_bytes()
    with ledger.write() as session:
        now = ledger.now(session)
        hold(session, lease, waiting_reason=None, updated_at=now)
        head, head_sha256 = session.execute(
            select(FragmentRow.head, FragmentRow.head_sha256).where(
                FragmentRow.run == lease.run, FragmentRow.fragment == lease.fragment
            )
        ).one()
        if head != before.head:
            raise LeaseLost(f"fragment {lease.fragment} of run {lease.run!r} is at version {head} already")
        if (end.version, end.previous) != (head + 1, head_sha256):
            raise ForkedHistory(
                f"the end of fragment {lease.fragment} of run {lease.run!r} does not continue version {head}",
                hint="the ledger belongs to another bucket, or history was altered",
            )
        insert_missing(
            session,
            FragmentEndRow,
            [
                {
                    "run": end.run,
                    "fragment": end.fragment,
                    "version": end.version,
                    "end": data,
                    "end_sha256": end.sha256,
                    "attestation": attestation.to_bytes(),
                }
            ],
        )
        rows = [
            {
                "run": end.run,
                "envelope": answer.envelope,
                "fragment": end.fragment,
                "version": answer.version,
                "learner": answer.learner,
                "verdict": answer.verdict,
                "answered_version": end.version,
                "received_at": now,
                "deliveries": 1,
            }
            for answer in end.answers
        ]
        upsert(session, ContributionRow, rows, replace=("verdict", "answered_version"))
        drop_unanswered(session, lease)
        counted = count_rows(end.run, end.fragment, end.version, end.unverified, end.over_quota)
        insert_missing(session, UnverifiedRow, counted)


def finish(ledger: Ledger, lease: Lease) -> None:
    """The end marker of the run is in the bucket: nobody serves it any more. Raises LeaseLost."""
    with ledger.write() as session:
        hold(session, lease)
        session.execute(update(RunRow).where(RunRow.run == lease.run).values(state="finished"))
