"""Intake: verdicts and the new stream position, in one transaction of the fragment's owner.

What happened twice is recognised by the envelope's hash. The position is compared as well as set, so an
owner that read from elsewhere changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Table, bindparam, func, select, update
from sqlalchemy.orm import Session

from deltapost.algorithms.sealing import Decision, Judged, OpenRound, Repeated, Uncounted
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.runs import Standing
from deltapost.ledger.tables import ContributionRow, UnverifiedRow
from deltapost.ledger.writing import add_counts, upsert
from deltapost.serialization.verdicts import Verdict

assert isinstance(ContributionRow.__table__, Table)
_TABLE = ContributionRow.__table__


def open_round(ledger: Ledger, run: str, fragment: int, head: int) -> OpenRound:
    """What is decided of the fragment's open round.

    Call it when no seal is pending: every unanswered verdict then belongs to the open round.
    """
    with ledger.read() as session:
        unanswered: Sequence[Any] = session.execute(
            select(
                ContributionRow.envelope,
                ContributionRow.learner,
                ContributionRow.version,
                ContributionRow.verdict,
                ContributionRow.payload_size,
                func.length(ContributionRow.message),
            ).where(
                ContributionRow.run == run,
                ContributionRow.fragment == fragment,
                ContributionRow.answered_version.is_(None),
            )
        ).all()
    view = OpenRound(head)
    for envelope, learner, version, verdict, payload_size, frame_bytes in unanswered:
        view.known[envelope] = verdict
        view.post(learner, payload_size or 0, frame_bytes or 0)
        if verdict == "accepted" and version == head:
            view.slots[learner] = envelope
    return view


def answered(ledger: Ledger, run: str, envelopes: Sequence[bytes]) -> dict[bytes, Verdict]:
    """The verdicts of those of the envelopes that a record has answered."""
    with ledger.read() as session:
        rows: Sequence[Any] = session.execute(
            select(_TABLE.c.envelope, _TABLE.c.verdict).where(
                _TABLE.c.run == run,
                _TABLE.c.envelope.in_(envelopes),
                _TABLE.c.answered_version.is_not(None),
            )
        ).all()
    return dict(map(tuple, rows))


def outstanding(ledger: Ledger, run: str, fragment: int) -> dict[str, int]:
    """How many accepted contributions each learner has in the open rounds of the run's other fragments."""
    with ledger.read() as session:
        rows: Sequence[Any] = session.execute(
            select(ContributionRow.learner, func.count())
            .where(
                ContributionRow.run == run,
                ContributionRow.fragment != fragment,
                ContributionRow.verdict == "accepted",
                ContributionRow.answered_version.is_(None),
            )
            .group_by(ContributionRow.learner)
        ).all()
    return dict(map(tuple, rows))


def envelope(ledger: Ledger, run: str, sha256: bytes) -> bytes | None:
    """The frame of an envelope that intake has seen."""
    with ledger.read() as session:
        return session.scalars(
            select(ContributionRow.message).where(
                ContributionRow.run == run, ContributionRow.envelope == sha256
            )
        ).one_or_none()


def record(
    ledger: Ledger,
    lease: Lease,
    before: Standing,
    position: str,
    decisions: Sequence[Decision],
) -> None:
    """Writes the decisions and moves the position from `before.position` to `position`.

    Raises LeaseLost when token, head, stream epoch or position in the row are not those of `before`.
    """
    with ledger.write() as session:
        now = ledger.now(session)
        hold(session, lease, at=before, position=position, updated_at=now)
        upsert(
            session,
            ContributionRow,
            [_row(lease, before, decision, now) for decision in decisions if isinstance(decision, Judged)],
            replace=("verdict", "detail", "entry_id", "stream_epoch"),
            count="deliveries",
        )
        add_deliveries(
            session,
            lease.run,
            Counter(decision.signed.sha256 for decision in decisions if isinstance(decision, Repeated)),
        )
        counts = Counter(
            (decision.reason, decision.learner) for decision in decisions if isinstance(decision, Uncounted)
        )
        add_counts(
            session,
            UnverifiedRow,
            [
                {
                    "run": lease.run,
                    "fragment": lease.fragment,
                    "version": before.head + 1,
                    "reason": reason,
                    "learner": learner,
                    "count": count,
                }
                for (reason, learner), count in sorted(counts.items())
            ],
        )


def add_deliveries(session: Session, run: str, deliveries: Mapping[bytes, int]) -> None:
    """Counts further deliveries of envelopes that have their rows."""
    if deliveries:
        session.connection().execute(
            update(_TABLE)
            .where(_TABLE.c.run == run, _TABLE.c.envelope == bindparam("of"))
            .values(deliveries=_TABLE.c.deliveries + bindparam("further")),
            [{"of": envelope, "further": count} for envelope, count in sorted(deliveries.items())],
        )


def _row(lease: Lease, before: Standing, decision: Judged, now: object) -> dict[str, object]:
    message = decision.message
    return {
        "run": lease.run,
        "envelope": decision.signed.sha256,
        "fragment": lease.fragment,
        "version": message.version,
        "learner": message.learner,
        "message": decision.signed.frame,
        "payload_sha256": message.payload.sha256,
        "payload_size": message.payload.size,
        "local_step": message.local_step,
        "steps": message.steps,
        "tokens": message.tokens,
        "step_seconds": message.step_seconds,
        "loss": message.loss,
        "metrics": message.metrics,
        "final": message.final,
        "verdict": decision.verdict,
        "detail": decision.detail[:500] or None,
        "deliveries": 1,
        "entry_id": decision.entry_id,
        "stream_epoch": before.stream_epoch,
        "received_at": now,
    }


def start_stream(ledger: Ledger, lease: Lease, before: Standing, stream_epoch: str, position: str) -> None:
    """A new life of the stream: its name and where to read from. Raises LeaseLost."""
    with ledger.write() as session:
        now = ledger.now(session)
        hold(session, lease, at=before, stream_epoch=stream_epoch, position=position, updated_at=now)


def note_waiting(ledger: Ledger, lease: Lease, reason: str | None) -> None:
    """Says in the fragment's row why its round does not close. Raises LeaseLost."""
    with ledger.write() as session:
        hold(session, lease, waiting_reason=reason and reason[:500], updated_at=ledger.now(session))
