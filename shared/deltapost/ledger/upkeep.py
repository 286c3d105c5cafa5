"""Upkeep: what housekeeping asks the ledger: who owns what now, how old rounds are, and how fast they come.

Ages compare the attestations' times of commit, which are their owners' clocks, with the database's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import case, func, select

from deltapost.algorithms.retention import Retain
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import FragmentRow, RoundRow


def owned(ledger: Ledger, run: str, owner: str) -> list[int]:
    """The fragments whose lease this owner holds now."""
    with ledger.read() as session:
        now = ledger.now(session)
        return list(
            session.scalars(
                select(FragmentRow.fragment)
                .where(
                    FragmentRow.run == run,
                    FragmentRow.owner == owner,
                    FragmentRow.lease_token.is_not(None),
                    FragmentRow.lease_expires_at > now,
                )
                .order_by(FragmentRow.fragment)
            )
        )


def heads(ledger: Ledger, run: str) -> dict[int, int]:
    """The head of each fragment."""
    with ledger.read() as session:
        rows = session.execute(select(FragmentRow.fragment, FragmentRow.head).where(FragmentRow.run == run))
        return {row.fragment: row.head for row in rows}


def releasable(ledger: Ledger, run: str, fragment: int, retain: Retain) -> tuple[int, int]:
    """The fragment's head, and the version below it through which the policy lets go; 0: nothing yet.

    Both are 0 for a fragment that the ledger does not know: it may just have been made anew.
    """
    with ledger.read() as session:
        head = session.scalars(
            select(FragmentRow.head).where(FragmentRow.run == run, FragmentRow.fragment == fragment)
        ).one_or_none()
        if head is None:
            return 0, 0
        if retain.rounds is not None:
            return head, max(0, head - retain.rounds)
        cutoff = ledger.now(session) - timedelta(days=retain.days or 0.0)
        first_kept = session.scalars(
            select(func.min(RoundRow.version)).where(
                RoundRow.run == run, RoundRow.fragment == fragment, RoundRow.committed_at >= cutoff
            )
        ).one()
    return head, max(0, min(head - 1, (first_kept or head) - 1))


@dataclass(frozen=True)
class Pace:
    """How fast the run has been lately: rounds and what they wrote, over `seconds`."""

    seconds: float
    rounds: int
    participants: int
    updates: int
    checkpoints: int
    stored_bytes: int
    delta_bytes: int
    state_bytes: int

    def per_day(self, count: float) -> float:
        return count * 86_400 / self.seconds if self.seconds > 0 else 0.0


def pace(
    ledger: Ledger, run: str, *, checkpoint_every: int = 1, window: timedelta = timedelta(days=1)
) -> Pace:
    """Of the rounds of the last `window`, or of all of a younger run. States are of checkpoints only."""
    stored = RoundRow.version % checkpoint_every == 0
    with ledger.read() as session:
        now = ledger.now(session)
        first: datetime | None = session.scalars(
            select(func.min(RoundRow.committed_at)).where(RoundRow.run == run)
        ).one()
        start = now - window if first is None else max(first, now - window)
        rounds, participants, updates, checkpoints, deltas, states, documents = session.execute(
            select(
                func.count(),
                func.sum(RoundRow.participants),
                func.count(RoundRow.update_size),
                func.sum(case((stored, 1), else_=0)),
                func.sum(RoundRow.bytes_in + func.coalesce(RoundRow.update_size, 0)),
                func.sum(case((stored, RoundRow.anchor_size + RoundRow.outer_size), else_=0)),
                func.sum(func.length(RoundRow.record) + func.length(RoundRow.attestation)),
            ).where(RoundRow.run == run, RoundRow.committed_at >= start)
        ).one()
    # Postgres sums integers to Decimal; of no rounds the sums are NULL.
    delta_bytes, state_bytes = int(deltas or 0), int(states or 0)
    return Pace(
        seconds=(now - start).total_seconds(),
        rounds=rounds,
        participants=int(participants or 0),
        updates=updates,
        checkpoints=int(checkpoints or 0),
        stored_bytes=delta_bytes + state_bytes + int(documents or 0),
        delta_bytes=delta_bytes,
        state_bytes=state_bytes,
    )
