"""Fleet: which aggregators live, by name, and which fragments wait for an owner. Times are the database's.

A name belongs to the process that drew its token, until it gives the name back or stops renewing it for a
lease: only then is a predecessor known to be dead. Name and leases are renewed in one transaction, so they
run out together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import AggregatorRow, AggregatorRunRow, FragmentRow, RunRow
from deltapost.ledger.writing import changed, insert_missing

#: Leases named in one statement: SQLite takes 32,766 values, Postgres 65,535.
LEASES_PER_STATEMENT = 1_000


@dataclass(frozen=True)
class Renewed:
    """The name is this process's. `lost`: the tokens that no fragment bears any more."""

    lost: frozenset[str]


@dataclass(frozen=True)
class NameHeld:
    """Another process bears the name until `until`, or longer if it lives."""

    until: datetime


@dataclass(frozen=True)
class Look:
    """The fleet at one instant.

    `fragments`: how many each active run has. `serving`: the living aggregators with the runs they serve;
    `settled`: those of them that have lived for a while. `free`: fragments that this one may take.
    """

    fragments: Mapping[str, int]
    serving: Mapping[str, frozenset[str]]
    settled: frozenset[str]
    free: Mapping[str, Sequence[int]]


def renew(
    ledger: Ledger, name: str, token: str, *, runs: Collection[str], leases: Collection[str], seconds: float
) -> Renewed | NameHeld:
    """Takes or keeps the name, says which runs are served, and moves the end of the leases."""
    with ledger.write() as session:
        now = ledger.now(session)
        expires_at = now + timedelta(seconds=seconds)
        held_until = _take_name(session, name, token, now, expires_at)
        if held_until is not None:
            return NameHeld(held_until)
        _say_runs(session, name, runs)
        lost: set[str] = set()
        tokens = sorted(leases)
        for start in range(0, len(tokens), LEASES_PER_STATEMENT):
            part = tokens[start : start + LEASES_PER_STATEMENT]
            lost |= set(part) - _renew_leases(session, part, expires_at)
    return Renewed(frozenset(lost))


def _take_name(
    session: Session, name: str, token: str, now: datetime, expires_at: datetime
) -> datetime | None:
    """None once the name is the token's; else until when it is another's."""
    mine = update(AggregatorRow).where(AggregatorRow.name == name, AggregatorRow.token == token)
    if changed(session, mine.values(expires_at=expires_at)):
        return None
    row = {"name": name, "token": token, "since": now, "expires_at": expires_at}
    past = update(AggregatorRow).where(AggregatorRow.name == name, AggregatorRow.expires_at < now)
    if changed(session, past.values(**row)):
        return None
    insert_missing(session, AggregatorRow, [row])
    found = session.execute(
        select(AggregatorRow.token, AggregatorRow.expires_at).where(AggregatorRow.name == name)
    ).one()
    return None if found.token == token else found.expires_at


def _say_runs(session: Session, name: str, runs: Collection[str]) -> None:
    said = set(session.scalars(select(AggregatorRunRow.run).where(AggregatorRunRow.name == name)))
    gone = said - set(runs)
    if gone:
        session.execute(
            delete(AggregatorRunRow).where(AggregatorRunRow.name == name, AggregatorRunRow.run.in_(gone))
        )
    insert_missing(
        session, AggregatorRunRow, [{"name": name, "run": run} for run in sorted(set(runs) - said)]
    )


def _renew_leases(session: Session, tokens: list[str], expires_at: datetime) -> set[str]:
    """Moves the end of the leases that are still there; returns their tokens.

    A row that a transaction of its own fragment has locked is passed over: it must not hold up the others,
    and its turn comes at the next renewal.
    """
    there = set(session.scalars(select(FragmentRow.lease_token).where(FragmentRow.lease_token.in_(tokens))))
    rows = session.execute(
        select(FragmentRow.run, FragmentRow.fragment)
        .where(FragmentRow.lease_token.in_(tokens))
        .with_for_update(skip_locked=True)
    ).all()
    by_run: dict[str, list[int]] = {}
    for run, fragment in rows:
        by_run.setdefault(run, []).append(fragment)
    for run, fragments in by_run.items():
        session.execute(
            update(FragmentRow)
            .where(
                FragmentRow.run == run,
                FragmentRow.fragment.in_(fragments),
                FragmentRow.lease_token.in_(tokens),
            )
            .values(lease_expires_at=expires_at),
            execution_options={"synchronize_session": False},
        )
    return {token for token in there if token is not None}


def look(ledger: Ledger, name: str, runs: Collection[str], *, settled_seconds: float) -> Look:
    """Who lives, who serves what, and which fragments of `runs` are free for the aggregator `name`.

    Free is what nobody holds and, for the bearer of a name, what still bears it: its predecessor is dead.
    """
    with ledger.read() as session:
        now = ledger.now(session)
        counted = session.execute(
            select(FragmentRow.run, func.count())
            .join(RunRow, RunRow.run == FragmentRow.run)
            .where(RunRow.state == "active")
            .group_by(FragmentRow.run)
        ).all()
        living = session.execute(
            select(AggregatorRow.name, AggregatorRow.since).where(AggregatorRow.expires_at >= now)
        ).all()
        said = session.execute(select(AggregatorRunRow.name, AggregatorRunRow.run)).all()
        rows = session.execute(
            select(FragmentRow.run, FragmentRow.fragment)
            .where(
                FragmentRow.run.in_(sorted(runs)),
                or_(
                    FragmentRow.lease_token.is_(None),
                    FragmentRow.lease_expires_at.is_(None),
                    FragmentRow.lease_expires_at < now,
                    FragmentRow.owner == name,
                ),
            )
            .order_by(FragmentRow.run, FragmentRow.fragment)
        ).all()
    free: dict[str, list[int]] = {}
    for run, fragment in rows:
        free.setdefault(run, []).append(fragment)
    served: dict[str, set[str]] = {row.name: set() for row in living}
    for other, run in said:
        if other in served:
            served[other].add(run)
    return Look(
        fragments=dict(counted),
        serving={other: frozenset(names) for other, names in served.items()},
        settled=frozenset(row.name for row in living if (now - row.since).total_seconds() >= settled_seconds),
        free=free,
    )


def leave(ledger: Ledger, name: str, token: str, *, leases: Collection[str]) -> None:
    """Gives the leases and the name back, so that others need not wait for their end."""
    with ledger.write() as session:
        tokens = sorted(leases)
        for start in range(0, len(tokens), LEASES_PER_STATEMENT):
            session.execute(
                update(FragmentRow)
                .where(FragmentRow.lease_token.in_(tokens[start : start + LEASES_PER_STATEMENT]))
                .values(lease_token=None, lease_expires_at=None, started_position=None),
                execution_options={"synchronize_session": False},
            )
        own = select(AggregatorRow.name).where(AggregatorRow.name == name, AggregatorRow.token == token)
        session.execute(
            delete(AggregatorRunRow).where(AggregatorRunRow.name.in_(own)),
            execution_options={"synchronize_session": False},
        )
        session.execute(
            delete(AggregatorRow).where(AggregatorRow.name == name, AggregatorRow.token == token),
            execution_options={"synchronize_session": False},
        )
