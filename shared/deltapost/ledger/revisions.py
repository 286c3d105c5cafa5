"""Schema revisions: which one a database has, which one this release needs, and the way between them.

Each way up or down is one transaction under one lock (an advisory lock on Postgres, the write lock on
SQLite), so two migrations at once both succeed, and a killed one leaves nothing behind.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from deltapost.errors import ConfigurationError, WrongRevision
from deltapost.ledger.failures import MIGRATE_HINT
from deltapost.migrations import DIRECTORY

if TYPE_CHECKING:
    from deltapost.ledger.engine import Ledger

__all__ = ["check", "current", "downgrade", "head", "migrate"]

#: The advisory lock that migrations of one Postgres database share: "deltapst" as a big-endian integer.
MIGRATION_LOCK: Final = int.from_bytes(b"deltapst")

#: Alembic keeps the running environment in a module, one per process.
_ALEMBIC: Final = threading.Lock()


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    # Alembic interpolates; a path may hold a per cent sign.
    config.set_main_option("script_location", str(DIRECTORY).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def head() -> str:
    """The revision that this release works with."""
    revision = _scripts().get_current_head()
    if revision is None:
        raise ConfigurationError("this installation has no ledger migrations", hint="install deltapost again")
    return revision


def current(connection: Connection) -> str | None:
    """The revision of the database; None when nothing was ever migrated."""
    return MigrationContext.configure(connection).get_current_revision()


def _known() -> set[str]:
    return {script.revision for script in _scripts().walk_revisions()}


def check(connection: Connection, *, ledger: str) -> None:
    """Raises WrongRevision unless the database is at `head()`; `ledger` names it in the message."""
    found, needed = current(connection), head()
    if found == needed:
        return
    if found is None:
        raise WrongRevision(f"the ledger {ledger} has no schema yet", hint=MIGRATE_HINT)
    if found in _known():
        raise WrongRevision(
            f"the ledger {ledger} is at revision {found}, older than this release's {needed}",
            hint=MIGRATE_HINT,
        )
    raise _newer(found, needed, ledger)


def _newer(found: str, needed: str, ledger: str) -> WrongRevision:
    return WrongRevision(
        f"the ledger {ledger} is at revision {found}, which is newer than this release's {needed}",
        hint="install the newer deltapost, whose `deltapost ledger migrate` knows it",
    )


def migrate(ledger: Ledger, target: str = "head") -> str:
    """Brings the schema up to `target` and returns the revision it then has. Again: nothing changes."""
    if target == "base":
        raise ConfigurationError("a migration goes up", hint="`deltapost ledger downgrade base` goes down")
    return _move(ledger, target, up=True) or ""


def downgrade(ledger: Ledger, target: str) -> str | None:
    """Takes the schema down to `target` (`"base"`: nothing is left, and what the tables held is gone)."""
    return _move(ledger, target, up=False)


def _move(ledger: Ledger, target: str, *, up: bool) -> str | None:
    known = _known()
    if target not in known | {"head", "base"}:
        raise ConfigurationError(
            f"there is no ledger revision {target!r}", hint="head, base or " + ", ".join(known)
        )
    with ledger.migrating() as connection:
        if ledger.dialect == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
        found = current(connection)  # read under the lock: another migration may just have ended
        if found is not None and found not in known:
            raise _newer(found, head(), ledger.name)
        try:
            with _ALEMBIC:
                (command.upgrade if up else command.downgrade)(_config(connection), target)
        except CommandError as error:
            raise ConfigurationError(f"the ledger {ledger.name} cannot go to {target!r}: {error}") from None
        return current(connection)
