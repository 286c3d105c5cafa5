"""The ledger: the real one on a SQLite database in memory, whose clock is simulated and whose disk can fail.

Nothing else runs during a transaction: it happens whole, in one turn, or not at all. One engine serves all
seeds of a real process, since what SQLAlchemy compiled is most of a transaction's cost.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from deltapost.errors import LedgerUnavailable
from deltapost.ledger import connecting
from deltapost.ledger.engine import Ledger
from deltapost.ledger.revisions import migrate
from simulator.boundary import Boundary
from simulator.scheduling import Scheduler

START_OF_TIME = datetime(2030, 1, 1, tzinfo=UTC)


class Database:
    """One SQLite database in memory; its content can be copied and put back."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)
        self.engine = create_engine("sqlite://", creator=lambda: self.connection, poolclass=StaticPool)
        event.listen(self.engine, "connect", connecting._prepare_sqlite)
        event.listen(self.engine, "begin", connecting._begin_sqlite)
        migrate(Ledger(self.engine))
        self.empty = self.copy()

    def copy(self) -> bytes:
        assert not self.connection.in_transaction
        return self.connection.serialize()

    def restore(self, content: bytes) -> None:
        assert not self.connection.in_transaction
        self.connection.deserialize(content)


@functools.cache
def database() -> Database:
    """This process's database."""
    return Database()


class SimulatedLedger(Ledger):
    """The ledger as the simulated processes see it. `committed` hears of each transaction that happened."""

    def __init__(
        self,
        database: Database,
        boundary: Boundary,
        scheduler: Scheduler,
        committed: Callable[[], None],
    ) -> None:
        super().__init__(database.engine)
        self._boundary = boundary
        self._scheduler = scheduler
        self._committed = committed

    def now(self, session: Session) -> datetime:
        return START_OF_TIME + timedelta(seconds=self._scheduler.now)

    @contextmanager
    def write(self) -> Iterator[Session]:
        fault = self._before("write")
        with super().write() as session:
            yield session
            if fault == "rolled_back":
                raise LedgerUnavailable("the connection was lost before the commit")
        self._committed()
        self._after(fault)

    @contextmanager
    def read(self) -> Iterator[Session]:
        fault = self._before("read")
        with super().read() as session:
            yield session
        if fault == "reply_lost":
            self._after(fault)

    def _before(self, operation: str) -> str:
        turn, now = self._scheduler.turn, self._scheduler.now
        turn(f"ledger.{operation}")
        if self._boundary.outages.get("ledger", 0.0) > now:
            turn("", 0.2)
            raise LedgerUnavailable("the database does not answer")
        fault = self._boundary.draw_ledger(operation, operation)
        if fault == "refused":
            raise LedgerUnavailable("refused")
        if fault == "delayed":
            turn("", self._boundary.delay())
        return fault

    def _after(self, fault: str) -> None:
        if fault == "reply_lost":
            self._scheduler.turn("", 0.5)
            raise LedgerUnavailable("the reply to the commit was lost")
        self._scheduler.turn("")
