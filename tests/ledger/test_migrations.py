"""Migrations go up, down and up again on both databases, two at once, after a kill, and match the classes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import CheckConstraint, inspect, select, text

from deltapost.errors import ConfigurationError, WrongRevision
from deltapost.ledger import revisions
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import Base, RunRow
from fixtures.ledger_rows import run_row

TABLES = {table.name for table in Base.metadata.sorted_tables}


@pytest.fixture
def empty(ledger_url: str) -> Iterator[Ledger]:
    ledger = open_ledger(ledger_url)
    yield ledger
    ledger.close()


def tables(ledger: Ledger) -> set[str]:
    with ledger.read() as session:
        return set(inspect(session.connection()).get_table_names()) - {"alembic_version"}


def views(ledger: Ledger) -> list[str]:
    with ledger.read() as session:
        return inspect(session.connection()).get_view_names()


def test_up_down_and_up_again(empty: Ledger) -> None:
    assert revisions.migrate(empty) == revisions.head()
    assert tables(empty) == TABLES
    assert views(empty) == ["round_audit"]

    assert revisions.downgrade(empty, "base") is None
    assert tables(empty) == set()
    assert views(empty) == []

    revisions.migrate(empty)
    empty.check_revision()
    with empty.write() as session:
        session.add(run_row())


def test_a_second_upgrade_changes_nothing(empty: Ledger) -> None:
    revisions.migrate(empty)
    with empty.write() as session:
        session.add(run_row())

    assert revisions.migrate(empty) == revisions.head()

    with empty.read() as session:
        assert session.scalars(select(RunRow.run)).all() == ["tiny"]


def test_the_migrated_schema_is_the_one_the_classes_say(empty: Ledger) -> None:
    revisions.migrate(empty)

    with empty.read() as session:
        options = {"compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(session.connection(), opts=options)
        differences = compare_metadata(context, Base.metadata)

    assert differences == []


def test_two_upgrades_at_once_both_succeed(ledger_url: str) -> None:
    code = textwrap.dedent(
        """
        import sys
        from deltapost.ledger import open_ledger
        from deltapost.ledger.revisions import migrate
        ledger = open_ledger(sys.argv[1])
        print("ready", flush=True)
        sys.stdin.readline()
        migrate(ledger)
        """
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, ledger_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    ends = [process.communicate("go\n", timeout=100) for process in started]

    assert [process.returncode for process in started] == [0, 0], ends
    ledger = open_ledger(ledger_url)
    ledger.check_revision()
    ledger.close()


def test_a_killed_migration_leaves_nothing_and_running_it_again_succeeds(
    empty: Ledger, ledger_url: str
) -> None:
    # Given a migration that is killed after half of its tables
    code = textwrap.dedent(
        """
        import os, signal, sys
        from sqlalchemy import Engine, event
        from deltapost.ledger import open_ledger
        from deltapost.ledger.revisions import migrate

        @event.listens_for(Engine, "before_cursor_execute")
        def kill(connection, cursor, statement, parameters, context, executemany):
            if "CREATE TABLE seals" in statement:
                os.kill(os.getpid(), signal.SIGKILL)

        migrate(open_ledger(sys.argv[1]))
        """
    )
    killed = subprocess.run([sys.executable, "-c", code, ledger_url], timeout=100, capture_output=True)
    assert killed.returncode == -signal.SIGKILL

    # Then nothing is there
    with pytest.raises(WrongRevision):
        empty.check_revision()
    assert tables(empty) == set()

    # And again it succeeds
    revisions.migrate(empty)
    empty.check_revision()


def test_a_ledger_newer_than_this_release_says_so(empty: Ledger) -> None:
    revisions.migrate(empty)
    with empty.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    for refuse in (empty.check_revision, lambda: revisions.migrate(empty)):
        with pytest.raises(WrongRevision, match="9999, which is newer than this release's"):
            refuse()


def test_an_unknown_target_names_the_known_ones(empty: Ledger) -> None:
    with pytest.raises(ConfigurationError, match=revisions.head()):
        revisions.migrate(empty, "0000")


def test_a_target_in_the_other_direction_is_refused(empty: Ledger) -> None:
    with pytest.raises(ConfigurationError, match="cannot go to '0001'"):
        revisions.downgrade(empty, "0001")
    revisions.migrate(empty)
    with pytest.raises(ConfigurationError, match="goes down"):
        revisions.migrate(empty, "base")
    empty.check_revision()


def test_threads_that_migrate_their_own_ledgers_at_once_all_succeed(tmp_path: Path) -> None:
    ledgers = [open_ledger(f"sqlite:///{tmp_path}/{number}.db") for number in range(4)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(revisions.migrate, ledgers)) == [revisions.head()] * 4

    for ledger in ledgers:
        ledger.close()


def test_foreign_keys_hold_again_after_a_migration_on_the_same_connection(sqlite_url: str) -> None:
    ledger = open_ledger(sqlite_url)
    revisions.migrate(ledger)
    with ledger.write() as session:
        assert session.execute(text("PRAGMA foreign_keys")).scalar_one() == 1
    ledger.close()


def test_every_check_of_the_classes_reads_the_same_in_the_database(sqlite_url: str) -> None:
    # SQLite keeps the words of a check as they were written; Postgres rewrites them.
    ledger = open_ledger(sqlite_url)
    revisions.migrate(ledger)
    with ledger.read() as session:
        found = inspect(session.connection())
        for table in Base.metadata.sorted_tables:
            written = {check["name"]: check["sqltext"] for check in found.get_check_constraints(table.name)}
            declared = {
                str(constraint.name): str(constraint.sqltext)
                for constraint in table.constraints
                if isinstance(constraint, CheckConstraint) and not str(constraint.name).endswith("_bool")
            }
            assert {name: text for name, text in written.items() if not name.endswith("_bool")} == declared
    ledger.close()
