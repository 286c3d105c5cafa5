"""Leases: at most one aggregator at a time may write a fragment's rows.

Each acquisition draws a random token. Every later transaction compares it in SQL, so a paused owner that
wakes up changes nothing: it meets LeaseLost. Times are the database's own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from deltapost.errors import LeaseLost
from deltapost.ledger.engine import Ledger
from deltapost.ledger.runs import Standing
from deltapost.ledger.tables import FragmentRow
from deltapost.ledger.writing import changed
from deltapost.limits import LEASE_SECONDS


@dataclass(frozen=True)
class Lease:
    """The right to write one fragment's rows while `token` stands in its row."""

    run: str
    fragment: int
    owner: str
    token: str
    epoch: int


def acquire(
    ledger: Ledger, run: str, fragment: int, owner: str, *, take_own: bool, seconds: float = LEASE_SECONDS
) -> Lease | None:
    """Takes the fragment's lease if it is free or ran out or, with `take_own`, bears this owner's name.

    `take_own` is for a process that has just started: what it held before its restart is its own. None when
    another owner holds the lease.
    """
    token = secrets.token_hex(16)
    with ledger.write() as session:
        now = ledger.now(session)
        free = [
            FragmentRow.lease_token.is_(None),
            FragmentRow.lease_expires_at.is_(None),
            FragmentRow.lease_expires_at < now,
        ]
        if take_own:
            free.append(FragmentRow.owner == owner)
        taken = changed(
            session,
            update(FragmentRow)
            .where(FragmentRow.run == run, FragmentRow.fragment == fragment, or_(*free))
            .values(
                owner=owner,
                lease_token=token,
                lease_epoch=FragmentRow.lease_epoch + 1,
                lease_expires_at=now + timedelta(seconds=seconds),
            ),
        )
        if not taken:
            return None
        epoch = session.scalars(
            select(FragmentRow.lease_epoch).where(FragmentRow.run == run, FragmentRow.fragment == fragment)
        ).one()
    return Lease(run, fragment, owner, token, epoch)


def renew(ledger: Ledger, lease: Lease, *, seconds: float = LEASE_SECONDS) -> None:
    """Moves the lease's end. Raises LeaseLost."""
    with ledger.write() as session:
        now = ledger.now(session)
        hold(session, lease, lease_expires_at=now + timedelta(seconds=seconds))


def release(ledger: Ledger, lease: Lease) -> None:
    """Gives the lease back, so that another aggregator need not wait for its end."""
    with ledger.write() as session:
        session.execute(
            update(FragmentRow)
            .where(
                FragmentRow.run == lease.run,
                FragmentRow.fragment == lease.fragment,
                FragmentRow.lease_token == lease.token,
            )
            .values(lease_token=None, lease_expires_at=None, started_position=None)
        )


def hold(session: Session, lease: Lease, *, at: Standing | None = None, **values: object) -> None:
    """Updates the fragment's row as its owner: the fence of every transaction.

    `at` says where the owner believes the fragment stands: head, stream epoch and position must be those too.
    Raises LeaseLost when the row says otherwise; nothing of the transaction happens then.
    """
    statement = update(FragmentRow).where(
        FragmentRow.run == lease.run,
        FragmentRow.fragment == lease.fragment,
        FragmentRow.lease_token == lease.token,
    )
    if at is not None:
        statement = statement.where(
            FragmentRow.head == at.head,
            FragmentRow.stream_epoch == at.stream_epoch,
            FragmentRow.position == at.position,
        )
    if not changed(session, statement.values(**(values or {"lease_token": lease.token}))):
        where = f" from version {at.head}, position {at.position}" if at is not None else ""
        raise LeaseLost(
            f"fragment {lease.fragment} of run {lease.run!r} moved on{where}, or {lease.owner} lost its lease"
        )
