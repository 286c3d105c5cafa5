"""From a ledger URL to a SQLAlchemy engine whose transactions begin the way the protocol needs them.

SQLite: WAL, foreign keys on, synchronous=FULL, writers begin with BEGIN IMMEDIATE (a transaction that reads
first and then writes fails at once under WAL, whatever the time-out). Postgres: psycopg 3, UTC, READ
COMMITTED for writers, and limits on how long a stopped process may keep others waiting.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

from deltapost.errors import ConfigurationError, MissingExtra

__all__ = ["MIGRATE", "READ", "WRITE", "build_engine", "parse_url"]

#: Seconds a transaction waits for another one's lock before the ledger counts as unavailable.
LOCK_SECONDS: Final = 30

#: Seconds after which Postgres ends a transaction whose process does nothing: a stopped owner's row locks go.
IDLE_TRANSACTION_SECONDS: Final = 30

#: Seconds to reach Postgres.
CONNECT_SECONDS: Final = 10

_OPTION: Final = "deltapost_transaction"
READ: Final = {_OPTION: "read"}
WRITE: Final = {_OPTION: "write"}
MIGRATE: Final = {_OPTION: "migrate"}

#: What SQLite is told before each transaction. Batch migrations copy and drop tables: no foreign keys then.
_SQLITE_BEGIN: Final = {
    "read": ("PRAGMA query_only = ON", "BEGIN"),
    "write": ("PRAGMA query_only = OFF", "PRAGMA foreign_keys = ON", "BEGIN IMMEDIATE"),
    "migrate": ("PRAGMA query_only = OFF", "PRAGMA foreign_keys = OFF", "BEGIN IMMEDIATE"),
}

_FORMS: Final = "use sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"


def parse_url(url: str) -> URL:
    """The URL, checked, with the driver that is used. Raises ConfigurationError, which shows no password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError("the ledger's URL cannot be read", hint=_FORMS) from None
    match parsed.drivername:
        case "sqlite" | "sqlite+pysqlite":
            return _sqlite_url(parsed)
        case "postgres" | "postgresql" | "postgresql+psycopg":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise ConfigurationError(f"a ledger cannot be opened with {other!r}", hint=_FORMS)


def _sqlite_url(parsed: URL) -> URL:
    database = parsed.database or ""
    if database in ("", ":memory:") or database.startswith("file:"):
        raise ConfigurationError(
            "a ledger in memory would be another one on each connection", hint="use sqlite:///PATH"
        )
    if parsed.query or parsed.host:
        raise ConfigurationError(
            "a sqlite:/// URL takes a path and nothing else", hint="an absolute path has four slashes"
        )
    if not Path(database).parent.is_dir():
        raise ConfigurationError(
            f"the ledger {database!r} lies in a directory that does not exist", hint="create it first"
        )
    return parsed.set(drivername="sqlite+pysqlite")


def build_engine(url: URL) -> Engine:
    """An engine for a URL from `parse_url`. Its connections are opened lazily. Raises MissingExtra."""
    # hide_parameters: errors would otherwise quote what was bound, such as messages and lease tokens.
    if url.drivername == "sqlite+pysqlite":
        engine = create_engine(url, connect_args={"timeout": LOCK_SECONDS}, hide_parameters=True)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtra("postgres", needed_for="a ledger at postgresql://") from None
    arguments = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_SECONDS}
    engine = create_engine(
        url,
        connect_args=arguments,
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        hide_parameters=True,
    )
    event.listen(engine, "connect", _prepare_postgres)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver would begin by itself, too late and never for DDL
    if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        _switch_to_wal(connection)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = FULL")


def _is_locked(error: BaseException) -> bool:
    busy = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in busy


# Two processes that open a new file at once: the switch does not wait for the other's lock by itself.
@retry(
    retry=retry_if_exception(_is_locked),
    wait=wait_random(0.01, 0.1),
    stop=stop_after_delay(LOCK_SECONDS),
    reraise=True,
)
def _switch_to_wal(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")


def _begin_sqlite(connection: Connection) -> None:
    kind = connection.get_execution_options().get(_OPTION, "write")
    for statement in _SQLITE_BEGIN[kind]:
        connection.exec_driver_sql(statement)


def _prepare_postgres(connection: Any, _record: object) -> None:
    connection.execute(
        f"SET timezone = 'UTC'; SET lock_timeout = '{LOCK_SECONDS}s'; "
        f"SET idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_SECONDS}s'"
    )
    connection.commit()
