"""Ledger: one database, opened once per process, with transactions that either happen whole or not at all.

`write()` and `read()` yield a session inside a transaction. It commits when the block ends and rolls back
when the block raises. A read sees one consistent snapshot and never takes a write lock.

Failure modes. Locked, restarting, full or not reachable is LedgerUnavailable: after one from `write()` it is
unknown whether the transaction happened, so read back before going on. A missing table is WrongRevision. A
row that a check, key or column type refuses is LedgerError (or NonFinite); SQLAlchemy's IntegrityError only
shows inside the block. A stopped process that holds a SQLite write transaction blocks the other writers until
it goes on or dies; on Postgres its transaction is ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from deltapost.ledger import revisions
from deltapost.ledger.connecting import MIGRATE, READ, WRITE, build_engine, parse_url
from deltapost.ledger.failures import translate

__all__ = ["Ledger", "open_ledger"]

Dialect = Literal["sqlite", "postgresql"]

_NOW = {
    "sqlite": text("SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now')"),
    "postgresql": text(
        "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US')"
    ),
}


class Ledger:
    """A SQL ledger. Safe to use from several threads; open it after a fork, not before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = engine.execution_options(**WRITE)
        self._reader = engine.execution_options(**READ)
        self.dialect: Dialect = "sqlite" if engine.dialect.name == "sqlite" else "postgresql"
        if self.dialect == "postgresql":
            self._reader = self._reader.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )

    def __repr__(self) -> str:
        return f"Ledger({self.name})"

    @property
    def name(self) -> str:
        """The URL without user name, password and options, for messages and logs."""
        url = self._engine.url
        where = f"{url.host or ''}{f':{url.port}' if url.port else ''}"
        return f"{self.dialect}://{where}/{url.database or ''}"

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that may write. SQLite: the only writer from its first moment on.

        Postgres: READ COMMITTED, so compare what a decision rests on (token, head, position) in the UPDATE.
        """
        with self._errors(), Session(self._writer, expire_on_commit=False) as session, session.begin():
            session.connection()  # BEGIN IMMEDIATE now, not at the first statement
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction on one consistent snapshot, in which the database itself refuses to write."""
        with self._errors(), Session(self._reader, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """The transaction in which `ledger.revisions` changes the schema; foreign keys off on SQLite."""
        with self._errors(), self._engine.execution_options(**MIGRATE).begin() as connection:
            yield connection

    def now(self, session: Session) -> datetime:
        """The database's present time in UTC, read within `session`: the one clock of leases.

        A value, so arithmetic with timedelta is the same on both databases. While a statement then waits for
        a row lock it grows old, which only makes a lease seem longer held, never shorter.
        """
        return datetime.fromisoformat(session.execute(_NOW[self.dialect]).scalar_one()).replace(tzinfo=UTC)

    def ping(self) -> None:
        """Raises LedgerUnavailable when the database does not answer."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def check_revision(self) -> None:
        """Raises WrongRevision, which names the command to run, unless the schema is this release's."""
        with self.read() as session:
            revisions.check(session.connection(), ledger=self.name)

    def close(self) -> None:
        """Closes the pooled connections."""
        self._engine.dispose()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, self._engine.dialect.loaded_dbapi.Error) as error:
            raise translate(error, ledger=self.name) from error


def open_ledger(url: str) -> Ledger:
    """The ledger at `sqlite:///PATH` or `postgresql://…` (extra `postgres`). Connects when first used.

    Raises ConfigurationError for another URL, MissingExtra without psycopg.

    >>> import tempfile
    >>> ledger = open_ledger(f"sqlite:///{tempfile.mkdtemp()}/ledger.db")
    >>> with ledger.read() as session:
    ...     ledger.now(session).tzname()
    'UTC'
    >>> ledger.close()
    """
    return Ledger(build_engine(parse_url(url)))
