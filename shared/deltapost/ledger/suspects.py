"""Suspects: which entry was being read when an owner's process died, and how often that has happened.

Nothing is written while all goes well. A new owner that finds the position where its predecessor began (so
that one died before it decided anything) reads the next entries one at a time, and notes each before it
reads it; so does one that finds such a note. An entry that was noted by MAX_STARTS_AT_ENTRY starts, and read
to the end by none, is skipped from then on. It is known by its bytes: posted again, it is skipped at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select

from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.tables import FragmentRow, SuspectRow
from deltapost.ledger.writing import insert_missing
from deltapost.limits import MAX_STARTS_AT_ENTRY


@dataclass(frozen=True)
class Inheritance:
    """What a new owner takes over: whether to be careful, and the entries that are not read any more."""

    careful: bool
    skipped: frozenset[bytes]


def begin(ledger: Ledger, lease: Lease, *, survived: bytes | None = None) -> Inheritance:
    """Notes where this owner begins to read. Raises LeaseLost.

    `survived`: an entry that this very process noted before it lost its lease. It lives, so that start does
    not count.
    """
    where = (FragmentRow.run == lease.run, FragmentRow.fragment == lease.fragment)
    with ledger.write() as session:
        position, began = session.execute(
            select(FragmentRow.position, FragmentRow.started_position).where(*where)
        ).one()
        hold(session, lease, started_position=position)
        noted = session.get(SuspectRow, (lease.run, lease.fragment, survived)) if survived else None
        if noted is not None and noted.starts > 1:
            noted.starts -= 1
        elif noted is not None:
            session.delete(noted)
        session.flush()
        found = session.execute(
            select(SuspectRow.entry, SuspectRow.starts).where(
                SuspectRow.run == lease.run, SuspectRow.fragment == lease.fragment
            )
        ).all()
    skipped = frozenset(entry for entry, starts in found if starts >= MAX_STARTS_AT_ENTRY)
    return Inheritance(position == began or len(found) > len(skipped), skipped)


def note(ledger: Ledger, lease: Lease, entry: bytes) -> int:
    """Counts a start at the entry (its SHA-256), before it is read; returns how many there were before.

    Raises LeaseLost.
    """
    key = {"run": lease.run, "fragment": lease.fragment, "entry": entry}
    with ledger.write() as session:
        hold(session, lease)
        before = session.get(SuspectRow, tuple(key.values()))
        starts = before.starts if before is not None else 0
        if before is None:
            insert_missing(session, SuspectRow, [{**key, "starts": 1}])
        else:
            before.starts = starts + 1
    return starts


def cleared(ledger: Ledger, lease: Lease) -> None:
    """Forgets what was noted: it was read, or something else than itself kept it from being. LeaseLost."""
    with ledger.write() as session:
        hold(session, lease)
        session.execute(
            delete(SuspectRow).where(
                SuspectRow.run == lease.run,
                SuspectRow.fragment == lease.fragment,
                SuspectRow.starts < MAX_STARTS_AT_ENTRY,
            )
        )
