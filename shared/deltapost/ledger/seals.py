"""Seals: the rows that fix a round, written before anything is computed.

The seal takes every verdict that no record answered yet, selected in the transaction that writes it, and the
position up to which everything is decided. From it and the payloads anyone computes the same record.

When a payload is lost afterwards, or the result is not finite, the next *generation* of the seal names who is
left out. Where too few would be left, the round's seals are withdrawn and it opens again: its verdicts are
dropped and the stream is read from its start. The record of any generation may still win.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from deltapost.algorithms.sealing import left_out_by, seal_content
from deltapost.errors import LeaseLost
from deltapost.ledger.counting import counts_for
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.rewinding import drop_unanswered
from deltapost.ledger.runs import Standing, newcomers
from deltapost.ledger.tables import ContributionRow, SealRow
from deltapost.ledger.writing import changed
from deltapost.serialization.messages import read_message
from deltapost.serialization.records import Record, SealContent
from deltapost.serialization.verdicts import Verdict
from deltapost.streams import START


@dataclass(frozen=True)
class Sealed:
    """A seal in force: what it fixes and the stream position it reaches through."""

    content: SealContent
    stream_epoch: str
    position: str


def pending(ledger: Ledger, run: str, fragment: int, head: int) -> Sealed | None:
    """The seal in force of the round from `head` to `head + 1`: its newest generation, if not withdrawn."""
    with ledger.read() as session:
        row = in_force(session, run, fragment, head + 1)
        return _sealed(row) if row is not None else None


def in_force(session: Session, run: str, fragment: int, version: int) -> SealRow | None:
    """The seal row of the highest generation of the round that produces `version`, if not withdrawn."""
    row = session.scalars(
        select(SealRow)
        .where(SealRow.run == run, SealRow.fragment == fragment, SealRow.version == version)
        .order_by(SealRow.generation.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None or row.withdrawn else row


Origin = Literal["noted", "sealed", "unknown"]


def origin(ledger: Ledger, record: Record) -> Origin:
    """What this ledger knows of a record found in the bucket, by all generations of its round's seal.

    `noted`: an owner computed it, see `note_record`. `sealed`: it says what a seal fixed.
    """
    with ledger.read() as session:
        rows: Sequence[Any] = session.execute(
            select(SealRow.record_sha256, SealRow.content).where(
                SealRow.run == record.run,
                SealRow.fragment == record.fragment,
                SealRow.version == record.version,
            )
        ).all()
    if any(row.record_sha256 == record.sha256 for row in rows):
        return "noted"
    followed = any(record.follows(SealContent.from_bytes(row.content)) for row in rows)
    return "sealed" if followed else "unknown"


def note_record(ledger: Ledger, lease: Lease, record: Record) -> None:
    """Notes what a seal's record is, before it is written: whoever finds it there may attest it.

    Without the note it would have to be computed again, which a payload lost meanwhile makes impossible.
    Raises LeaseLost, also when the database was restored meanwhile and knows no such seal.
    """
    with ledger.write() as session:
        hold(session, lease)
        noted = changed(
            session,
            update(SealRow)
            .where(
                SealRow.run == lease.run,
                SealRow.fragment == lease.fragment,
                SealRow.version == record.version,
                SealRow.generation == record.generation,
            )
            .values(record_sha256=record.sha256),
        )
        if not noted:
            raise LeaseLost(
                f"the seal of version {record.version} of run {lease.run!r} is not in the ledger any more"
            )


def _sealed(row: SealRow) -> Sealed:
    return Sealed(SealContent.from_bytes(row.content), row.stream_epoch, row.position)


def seal(ledger: Ledger, lease: Lease, before: Standing, quorum_size: int) -> Sealed:
    """Seals the open round through `before.position`. Raises LeaseLost when the row is not at `before`."""
    with ledger.write() as session:
        hold(session, lease, at=before, waiting_reason=None, updated_at=ledger.now(session))
        rows: Sequence[Any] = session.execute(
            select(ContributionRow.message, ContributionRow.verdict).where(
                ContributionRow.run == lease.run,
                ContributionRow.fragment == lease.fragment,
                ContributionRow.answered_version.is_(None),
            )
        ).all()
        unverified, over_quota = counts_for(session, lease.run, lease.fragment, before.head + 1)
        content = seal_content(
            run=lease.run,
            fragment=lease.fragment,
            head=before.head,
            generation=_next_generation(session, lease, before.head + 1),
            rows=[(read_message(message), verdict) for message, verdict in rows],
            unverified=unverified,
            over_quota=over_quota,
            newcomers=newcomers(session, lease.run, before.head),
            quorum_size=quorum_size,
        )
        return _add(session, ledger, content, before.stream_epoch, before.position)


def leave_out(
    ledger: Ledger,
    lease: Lease,
    before: Standing,
    sealed: Sealed,
    verdicts: Mapping[bytes, Verdict],
    *,
    quorum_size: int,
    min_quorum: int,
) -> Sealed | None:
    """Seals the next generation, without the claims in `verdicts` (by envelope, with why).

    None when fewer than `min_quorum` would be left: then the round's seals are withdrawn and it is open
    again, with nothing decided that a record does not answer. Raises LeaseLost when the seal is not in force.
    """
    with ledger.write() as session:
        hold(session, lease, at=before)
        row = in_force(session, lease.run, lease.fragment, before.head + 1)
        if row is None or SealContent.from_bytes(row.content) != sealed.content:
            raise LeaseLost(f"the seal of version {before.head + 1} of run {lease.run!r} is not in force")
        content = left_out_by(
            sealed.content,
            verdicts,
            newcomers=newcomers(session, lease.run, before.head),
            quorum_size=quorum_size,
        )
        if content is None or len(content.claims) < min_quorum:
            session.execute(
                update(SealRow)
                .where(
                    SealRow.run == lease.run,
                    SealRow.fragment == lease.fragment,
                    SealRow.version == before.head + 1,
                )
                .values(withdrawn=True)
            )
            # What was computed would come out the same again, and the round be sealed the same for ever.
            computed = {envelope for envelope, verdict in verdicts.items() if verdict == "non_finite"}
            _change_verdicts(session, lease, {envelope: verdicts[envelope] for envelope in computed})
            # So would those of the generations, and of the openings, before it.
            computed |= {
                answer.envelope for answer in sealed.content.answers if answer.verdict == "non_finite"
            }
            drop_unanswered(session, lease, keep=computed)
            hold(session, lease, position=START, updated_at=ledger.now(session))
            return None
        _change_verdicts(session, lease, verdicts)
        hold(session, lease, updated_at=ledger.now(session))
        return _add(session, ledger, content, sealed.stream_epoch, sealed.position)


def _change_verdicts(session: Session, lease: Lease, verdicts: Mapping[bytes, Verdict]) -> None:
    for envelope, verdict in verdicts.items():
        session.execute(
            update(ContributionRow)
            .where(ContributionRow.run == lease.run, ContributionRow.envelope == envelope)
            .values(verdict=verdict, detail="left out after the round was sealed")
        )


def _add(session: Session, ledger: Ledger, content: SealContent, stream_epoch: str, position: str) -> Sealed:
    data = content.to_bytes()
    session.add(
        SealRow(
            run=content.run,
            fragment=content.fragment,
            version=content.version,
            generation=content.generation,
            stream_epoch=stream_epoch,
            position=position,
            content=data,
            content_sha256=hashlib.sha256(data).digest(),
            degraded=content.degraded,
            sealed_at=ledger.now(session),
        )
    )
    return Sealed(content, stream_epoch, position)


def _next_generation(session: Session, lease: Lease, version: int) -> int:
    highest: int | None = session.scalars(
        select(func.max(SealRow.generation)).where(
            SealRow.run == lease.run, SealRow.fragment == lease.fragment, SealRow.version == version
        )
    ).one()
    return 0 if highest is None else highest + 1
