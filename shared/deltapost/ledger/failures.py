"""What a database driver raised, as deltapost's errors: without passwords, statements or bound values."""

from __future__ import annotations

import sqlite3
from typing import Final

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from deltapost.errors import DeltapostError, LedgerError, LedgerUnavailable, WrongRevision

__all__ = ["MIGRATE_HINT", "translate"]

MIGRATE_HINT: Final = "run `deltapost ledger migrate`"

#: SQLSTATE classes and codes that a later try may not meet again: connection, read-only standby or ended
#: transaction, rollback, resources, lock not available, operator, system.
_RETRYABLE_STATES: Final = ("08", "25", "40", "53", "55", "57", "58")

#: SQLSTATE undefined_table and undefined_column.
_UNDEFINED: Final = ("42P01", "42703")


def translate(error: Exception, *, ledger: str) -> DeltapostError:
    """The error to raise in place of SQLAlchemy's, or of a driver's that came while connecting.

    `ledger` names the database, without its password.
    """
    original = getattr(error, "orig", None) if isinstance(error, SQLAlchemyError) else error
    if isinstance(original, DeltapostError):
        return original  # refused by a column's type, before the driver
    words = _first_line(original if original is not None else error)
    if isinstance(error, PoolTimeout):
        return LedgerUnavailable(f"all connections to the ledger {ledger} are busy")
    if _is_undefined(original):
        return WrongRevision(f"the ledger {ledger} lacks a table or column: {words}", hint=MIGRATE_HINT)
    if _is_retryable(error, original):
        return LedgerUnavailable(f"the ledger {ledger} is not available: {words}")
    if isinstance(error, IntegrityError):
        return LedgerError(f"the ledger {ledger} refused a row: {words}")
    return LedgerError(f"the ledger {ledger} failed: {words}")


def _first_line(error: BaseException) -> str:
    # Postgres adds a DETAIL line that quotes the whole row.
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _is_undefined(original: BaseException | None) -> bool:
    if isinstance(original, sqlite3.OperationalError):
        return str(original).startswith("no such ") or " has no column named " in str(original)
    return getattr(original, "sqlstate", None) in _UNDEFINED


def _is_retryable(error: Exception, original: BaseException | None) -> bool:
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if isinstance(original, sqlite3.Error):
        return (
            isinstance(original, sqlite3.OperationalError) and _sqlite_code(original) != sqlite3.SQLITE_ERROR
        )
    state = getattr(original, "sqlstate", None)
    if state is not None:
        return str(state).startswith(_RETRYABLE_STATES)
    # It never reached the server, or lost it.
    return isinstance(error, OperationalError | InterfaceError) or not isinstance(error, SQLAlchemyError)


def _sqlite_code(original: sqlite3.Error) -> int | None:
    return getattr(original, "sqlite_errorcode", None)
