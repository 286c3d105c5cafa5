"""Statements that both databases need spelled their own way: insert-or-update by primary key.

Every function takes plain rows; an empty list is nothing to do. All run inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import CursorResult, FromClause, Update, inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from deltapost.ledger.tables import Base

Row = Mapping[str, Any]


def changed(session: Session, statement: Update) -> bool:
    """Executes the update; whether it matched exactly the row it was meant for."""
    result = session.execute(statement, execution_options={"synchronize_session": False})
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def _insert(session: Session, table: type[Base] | FromClause) -> Any:
    dialect = session.get_bind().dialect.name
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)


def _key(table: type[Base]) -> list[str]:
    return [column.name for column in inspect(table).primary_key]


def insert_missing(session: Session, table: type[Base], rows: Sequence[Row]) -> None:
    """Inserts the rows whose primary key is not there yet."""
    if rows:
        statement = _insert(session, table)
        session.execute(statement.on_conflict_do_nothing(index_elements=_key(table)), list(rows))


def upsert(
    session: Session,
    table: type[Base],
    rows: Sequence[Row],
    *,
    replace: Sequence[str],
    count: str | None = None,
) -> None:
    """Inserts the rows; where the primary key is there, `replace` columns take the new value.

    `count` names a column that grows by one instead.
    """
    if not rows:
        return
    statement = _insert(session, inspect(table).local_table)
    values: dict[str, Any] = {column: statement.excluded[column] for column in replace}
    if count is not None:
        values[count] = inspect(table).columns[count] + 1
    statement = statement.on_conflict_do_update(index_elements=_key(table), set_=values)
    # One row after another, in their order; not through the mapper, which costs more than the database does.
    session.connection().execute(statement, [dict(row) for row in rows])


def add_counts(session: Session, table: type[Base], rows: Sequence[Row]) -> None:
    """Inserts the rows; where the primary key is there, their `count` is added to it."""
    if not rows:
        return
    statement = _insert(session, table)
    summed = inspect(table).columns["count"] + statement.excluded["count"]
    session.execute(
        statement.on_conflict_do_update(index_elements=_key(table), set_={"count": summed}),
        [dict(row) for row in rows],
    )
