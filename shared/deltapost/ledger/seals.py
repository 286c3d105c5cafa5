"""Seals: the rows that fix a round, written before anything is computed.

The seal takes every verdict that no record answered yet, selected in the transaction that writes it, and the
position up to which everything is decided. From it and the payloads anyone computes the same record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from deltapost.algorithms.sealing import seal_content
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.runs import Standing
from deltapost.ledger.tables import ContributionRow, SealRow, UnverifiedRow
from deltapost.serialization.messages import read_message
from deltapost.serialization.records import SealContent


@dataclass(frozen=True)
class Sealed:
    """A seal in force: what it fixes and the stream position it reaches through."""

    content: SealContent
    stream_epoch: str
    position: str


def pending(ledger: Ledger, run: str, fragment: int, head: int) -> Sealed | None:
    """The newest generation of the seal of the round from `head` to `head + 1`, if it is sealed."""
    with ledger.read() as session:
        row = newest(session, run, fragment, head + 1)
        return _sealed(row) if row is not None else None


def newest(session: Session, run: str, fragment: int, version: int) -> SealRow | None:
    """The seal row of the highest generation of the round that produces `version`."""
    return session.scalars(
        select(SealRow)
        .where(SealRow.run == run, SealRow.fragment == fragment, SealRow.version == version)
        .order_by(SealRow.generation.desc())
        .limit(1)
    ).one_or_none()


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
        counts: Sequence[Any] = session.execute(
            select(UnverifiedRow.reason, UnverifiedRow.learner, UnverifiedRow.count).where(
                UnverifiedRow.run == lease.run,
                UnverifiedRow.fragment == lease.fragment,
                UnverifiedRow.version == before.head + 1,
            )
        ).all()
        content = seal_content(
            run=lease.run,
            fragment=lease.fragment,
            head=before.head,
            generation=0,
            rows=[(read_message(message), verdict) for message, verdict in rows],
            unverified={reason: count for reason, learner, count in counts if not learner},
            over_quota={learner: count for _, learner, count in counts if learner},
            quorum_size=quorum_size,
        )
        data = content.to_bytes()
        session.add(
            SealRow(
                run=lease.run,
                fragment=lease.fragment,
                version=before.head + 1,
                generation=0,
                stream_epoch=before.stream_epoch,
                position=before.position,
                content=data,
                content_sha256=hashlib.sha256(data).digest(),
                degraded=content.degraded,
                sealed_at=ledger.now(session),
            )
        )
    return Sealed(content, before.stream_epoch, before.position)
