"""A database that restarts, cuts connections, is full, emptied or restored from an old copy: waited out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.serialization.names import record_key
from fixtures.history import copy_rows, restore_rows
from fixtures.postgres import PostgresServer
from fixtures.served import Served
from fixtures.training import Training, training


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server that a test may restart under nobody else."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def on_either(ledger: Ledger, tmp_path: Path) -> Served:
    """Without an aggregator so far, once over each kind of database."""
    return Served(ledger, tmp_path)


@pytest.mark.slow
def test_a_postgres_that_restarts_mid_run_is_waited_out(own_postgres: PostgresServer, tmp_path: Path) -> None:
    from deltapost.ledger.revisions import migrate

    ledger = open_ledger(own_postgres.url(own_postgres.create()))
    migrate(ledger)
    with training(Served(ledger, tmp_path)) as trained:
        for round_ in range(3):
            trained.publish(round_)
            own_postgres.restart()
            assert trained.run.wait_for(0, round_ + 1, timeout=60), trained.health.problems()
        trained.whole(3)
    ledger.close()


def test_connections_that_postgres_cuts_are_made_anew(
    postgres_server: PostgresServer, migrated_postgres: str, migrated_postgres_url: str, tmp_path: Path
) -> None:
    ledger = open_ledger(migrated_postgres_url)
    with training(Served(ledger, tmp_path)) as trained:
        for round_ in range(4):
            trained.publish(round_)
            postgres_server.cut_connections(migrated_postgres)
            assert trained.run.wait_for(0, round_ + 1, timeout=60), trained.health.problems()
        trained.whole(4)
    ledger.close()


class FullDisk:
    """Lets the SQLite file grow no further while it is on."""

    def __init__(self, ledger: Ledger) -> None:
        self.on = False
        event.listen(ledger._engine, "checkout", self._limit)

    def _limit(self, connection: Any, *_others: object) -> None:
        pages = 1 if self.on else 2**31
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        self.on = False


def test_a_sqlite_file_that_may_not_grow_shows_in_readiness_and_the_run_goes_on_once_it_may(
    migrated_sqlite_url: str, tmp_path: Path
) -> None:
    ledger = open_ledger(migrated_sqlite_url)
    disk = FullDisk(ledger)
    with training(Served(ledger, tmp_path)) as trained:
        trained.to(1)
        disk.begin()
        reached = _rounds_until_full(trained)
        disk.end()

        trained.to(reached + 2)
        trained.whole(reached + 2)
    ledger.close()


def _rounds_until_full(trained: Training) -> int:
    """Free pages of the file take some rounds; then nothing is acknowledged, and readiness says why."""
    for version in range(1, 200):
        trained.publish(version)
        while not trained.run.wait_for(0, version + 1, timeout=0.2):
            if "full" in str(trained.health.problems()):
                return version
    raise AssertionError("the file never was full")


def records(served: Served, head: int) -> list[bytes]:
    return [served.store.get(record_key("tiny", 0, version)).data for version in range(1, head + 1)]


@pytest.mark.slow
def test_a_database_that_is_emptied_mid_run_is_filled_from_the_bucket_and_forks_nothing(
    on_either: Served,
) -> None:
    with training(on_either) as trained:
        trained.to(2)
        before = records(on_either, 2)

        restore_rows(on_either.ledger, {})

        trained.to(4)
        trained.whole(4)
        assert records(on_either, 2) == before


def test_a_database_that_is_restored_from_an_old_copy_mid_run_adopts_what_came_after_it(
    on_either: Served,
) -> None:
    with training(on_either) as trained:
        trained.to(1)
        old = copy_rows(on_either.ledger)
        trained.to(3)
        before = records(on_either, 3)

        restore_rows(on_either.ledger, old)

        trained.to(5)
        trained.whole(5)
        assert records(on_either, 3) == before
