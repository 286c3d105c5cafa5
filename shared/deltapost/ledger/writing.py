"""Statements that both databases need spelled their own way: insert-or-update by primary key.

Every function takes plain rows; an empty list is nothing to do. All run inside the caller's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    CursorResult,
    Dialect,
    FromClause,
    Text,
    TypeDecorator,
    Update,
    bindparam,
    cast,
    column,
    func,
    inspect,
    literal_column,
    select,
)
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
    key, its = _key(table), inspect(table)
    # In the order of the rows; not through the mapper, which costs more than the database does.
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        columns = list(rows[0])
        statement = statement.from_select(columns, _sent(its.local_table, columns))
        statement = statement.on_conflict_do_update(index_elements=key, set_=values)
        for part in _distinct(rows, key):
            connection.execute(
                statement, {"rows": _as_json(inspect(table).columns, part, connection.dialect)}
            )
        return
    statement = statement.on_conflict_do_update(index_elements=key, set_=values)
    connection.execute(statement, [dict(row) for row in rows])


def _distinct(rows: Sequence[Row], key: Sequence[str]) -> Iterator[list[Row]]:
    """The rows in their order, in parts in which no key is there twice: a statement meets a row once."""
    part: list[Row] = []
    keys: set[tuple[Any, ...]] = set()
    for row in rows:
        of_row = tuple(row[column] for column in key)
        if of_row in keys:
            yield part
            part, keys = [], set()
        part.append(row)
        keys.add(of_row)
    yield part


def _sent(table: Any, columns: Sequence[str]) -> Any:
    """Rows that Postgres reads out of one JSON parameter: hundreds of them cost it one statement."""
    rows = func.json_populate_recordset(
        literal_column(f"NULL::{table.name}"), cast(bindparam("rows", type_=Text), postgresql.JSON)
    )
    return select(*map(column, columns)).select_from(rows)


def _as_json(columns: Any, rows: Sequence[Row], dialect: Dialect) -> str:
    """What the rows' values are bound as, as JSON. All rows have the keys of the first."""
    bound = {}
    for name in rows[0]:
        kind = columns[name].type
        bound[name] = kind.process_bind_param if isinstance(kind, TypeDecorator) else _as_it_is
    given = [{name: bound[name](row[name], dialect) for name in bound} for row in rows]
    return json.dumps(given, default=_text, separators=(",", ":"), allow_nan=False)


def _as_it_is(value: Any, _dialect: Dialect) -> Any:
    return value


def _text(value: bytes | datetime) -> str:
    """As Postgres reads it: bytes in hexadecimal, times with their zone."""
    return "\\x" + value.hex() if isinstance(value, bytes) else value.isoformat()


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
