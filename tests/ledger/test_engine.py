"""Transactions happen whole, reads see one moment, and every failure is an error of deltapost's tree."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, text, update

from deltapost.errors import ConfigurationError, LedgerError, LedgerUnavailable, WrongRevision
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import FragmentRow, RunRow
from fixtures.ledger_rows import RUN, WHEN, fragment_row, run_row


def create_run(ledger: Ledger) -> None:
    with ledger.write() as session:
        session.add(run_row())
        session.flush()
        session.add(fragment_row())


def test_a_transaction_that_raises_leaves_nothing(ledger: Ledger) -> None:
    def fail_in_the_middle() -> None:
        with ledger.write() as session:
            session.add(run_row())
            session.flush()
            raise RuntimeError("the block failed")

    with pytest.raises(RuntimeError):
        fail_in_the_middle()

    with ledger.read() as session:
        assert session.scalars(select(RunRow)).all() == []


def test_rows_stay_readable_after_their_transaction(ledger: Ledger) -> None:
    create_run(ledger)

    with ledger.read() as session:
        row = session.get(FragmentRow, (RUN, 0))

    assert row is not None
    assert (row.head, row.position, row.stream_epoch, row.lease_epoch, row.announced) == (0, "0-0", "", 0, 0)


def test_a_read_refuses_to_write(ledger: Ledger) -> None:
    create_run(ledger)

    with pytest.raises((LedgerError, LedgerUnavailable)), ledger.read() as session:
        session.execute(update(FragmentRow).values(head=1))

    with ledger.read() as session:
        assert session.scalar(select(FragmentRow.head)) == 0


def test_a_connection_that_was_read_with_writes_again(ledger: Ledger) -> None:
    create_run(ledger)
    for head in (1, 2, 3):
        with ledger.write() as session:
            session.execute(update(FragmentRow).values(head=head))
        with ledger.read() as session:
            assert session.scalar(select(FragmentRow.head)) == head


def test_a_read_sees_one_moment_while_others_write(ledger: Ledger) -> None:
    create_run(ledger)

    with ledger.read() as reading:
        before = reading.scalar(select(FragmentRow.head))
        with ledger.write() as writing:
            writing.execute(update(FragmentRow).values(head=7))
        after = reading.scalar(select(FragmentRow.head))

    assert (before, after) == (0, 0)
    with ledger.read() as session:
        assert session.scalar(select(FragmentRow.head)) == 7


def test_eight_writers_and_a_reader_lose_no_count_and_meet_no_error(ledger: Ledger) -> None:
    # Given a counter, eight threads that read it and then write it, and a reader meanwhile
    create_run(ledger)
    done = threading.Event()

    def count_up() -> None:
        for _ in range(10):
            with ledger.write() as session:
                chosen = select(FragmentRow).where(FragmentRow.run == RUN).with_for_update()
                row = session.scalars(chosen).one()
                row.head += 1

    def watch() -> list[int]:
        seen: list[int] = []
        while not done.is_set():
            with ledger.read() as session:
                seen.append(session.scalars(select(FragmentRow.head)).one())
        return seen

    # When all are done
    with ThreadPoolExecutor(9) as pool:
        watching = pool.submit(watch)
        for counting in [pool.submit(count_up) for _ in range(8)]:
            counting.result()
        done.set()
        seen = watching.result()

    # Then every step counted, and the reader only ever saw growing numbers
    with ledger.read() as session:
        assert session.scalar(select(FragmentRow.head)) == 80
    assert seen == sorted(seen)


def test_processes_that_open_a_new_file_at_once_all_get_it(sqlite_url: str) -> None:
    code = textwrap.dedent(
        """
        import sys
        from deltapost.ledger import open_ledger
        ledger = open_ledger(sys.argv[1])
        ledger.ping()
        with ledger.write() as session:
            print(session.connection().exec_driver_sql("PRAGMA journal_mode").scalar_one())
        """
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, sqlite_url], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]

    ends = [(process.communicate(timeout=100)[0].strip(), process.returncode) for process in started]

    assert ends == [("wal", 0)] * 3


def test_sqlite_is_durable_and_keeps_its_keys(migrated_sqlite_url: str) -> None:
    ledger = open_ledger(migrated_sqlite_url)
    with ledger.write() as session:
        told = [
            session.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        ]
    ledger.close()

    assert told == ["wal", 1, 2, 30_000]


def test_a_locked_sqlite_ledger_is_unavailable_for_now(migrated_sqlite_url: str) -> None:
    # Given a writer that waits only a moment for locks, and another one that holds the lock
    ledger, other = open_ledger(migrated_sqlite_url), open_ledger(migrated_sqlite_url)
    with ledger.read() as session:
        session.execute(text("PRAGMA busy_timeout = 10"))

    with other.write(), pytest.raises(LedgerUnavailable, match="locked") as caught, ledger.write():
        pass

    assert caught.value.retryable
    ledger.close()
    other.close()


def test_a_file_that_is_no_database_is_an_error_that_no_retry_mends(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_text("not a database, but long enough for one, " * 100)
    ledger = open_ledger(f"sqlite:///{path}")

    with pytest.raises(LedgerError, match="not a database") as caught:
        ledger.ping()

    assert not caught.value.retryable
    ledger.close()


def test_a_path_that_is_a_directory_is_unavailable(tmp_path: Path) -> None:
    ledger = open_ledger(f"sqlite:///{tmp_path}")

    with pytest.raises(LedgerUnavailable, match="unable to open"):
        ledger.ping()
    ledger.close()


def test_a_killed_postgres_connection_is_unavailable_and_the_next_one_works(
    migrated_postgres_url: str,
) -> None:
    ledger = open_ledger(migrated_postgres_url)

    def lose_the_connection() -> None:
        with ledger.write() as session:
            own = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with ledger.write() as killing:
                killing.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": own})
            session.execute(text("SELECT 1"))

    with pytest.raises(LedgerUnavailable):
        lose_the_connection()

    ledger.ping()
    ledger.close()


def test_a_deadlock_is_unavailable_for_now(migrated_postgres_url: str) -> None:
    # Given two transactions that each hold what the other wants
    ledger = open_ledger(migrated_postgres_url)
    create_run(ledger)
    with ledger.write() as session:
        session.add(fragment_row(1))
    both_hold = threading.Barrier(2, timeout=30)

    def cross(first: int, second: int) -> str:
        try:
            with ledger.write() as session:
                session.execute(update(FragmentRow).where(FragmentRow.fragment == first).values(head=1))
                both_hold.wait()
                session.execute(update(FragmentRow).where(FragmentRow.fragment == second).values(head=1))
        except LedgerUnavailable as error:
            return error.code
        return "done"

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(cross, 0, 1), pool.submit(cross, 1, 0)]

        assert sorted(end.result() for end in ends) == ["done", "ledger_unavailable"]
    ledger.close()


def test_the_databases_clock_is_utc_and_takes_part_in_arithmetic(ledger: Ledger) -> None:
    create_run(ledger)
    with ledger.write() as session:
        now = ledger.now(session)
        session.execute(update(FragmentRow).values(lease_expires_at=now + timedelta(seconds=15)))

        held = select(FragmentRow).where(FragmentRow.lease_expires_at > now + timedelta(seconds=14))
        ended = select(FragmentRow).where(FragmentRow.lease_expires_at < now + timedelta(seconds=16))
        assert session.scalars(held).one() is session.scalars(ended).one()

    assert now.tzinfo is UTC
    assert abs(now - datetime.now(UTC)) < timedelta(minutes=1)


def test_leases_do_not_depend_on_the_time_zone_of_postgres(migrated_postgres_url: str) -> None:
    ledger = open_ledger(migrated_postgres_url)
    with ledger.write() as session:
        session.execute(text("SET LOCAL timezone = 'Asia/Kathmandu'"))
        session.add(run_row())
        session.flush()
        session.expire_all()

        assert abs(ledger.now(session) - datetime.now(UTC)) < timedelta(minutes=1)
        assert session.scalars(select(RunRow.created_at)).one() == WHEN
    ledger.close()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:ledger?mode=memory&uri=true",
        "sqlite:////no/such/directory/ledger.db",
        "sqlite:///ledger.db?timeout=0",
        "mysql://user:sesame@host/ledger",
        "postgresql+asyncpg://user:sesame@host/ledger",
        "postgresql://user:sesame@host:port/ledger",
        "not a url",
        "",
    ],
)
def test_a_url_that_cannot_work_is_refused_with_a_hint_and_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_ledger(url)

    assert caught.value.hint
    assert "sesame" not in str(caught.value)


def test_no_password_shows_in_repr_or_errors() -> None:
    # Given a Postgres where nobody listens
    ledger = open_ledger("postgresql://user:sesame@127.0.0.1:1/ledger?connect_timeout=2")

    with pytest.raises(LedgerUnavailable) as caught:
        ledger.ping()

    assert "127.0.0.1:1/ledger" in str(caught.value)
    shown = f"{ledger!r} {caught.value} {caught.value.__cause__}"
    assert "sesame" not in shown
    ledger.close()


@pytest.mark.parametrize(
    "url",
    ["postgres://u@h/d", "postgresql://u@h/d", "postgresql+psycopg://u@h/d"],
    ids=["short", "plain", "driver"],
)
def test_every_spelling_of_postgres_uses_psycopg_3(url: str) -> None:
    assert open_ledger(url).dialect == "postgresql"


def test_without_psycopg_the_missing_extra_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "psycopg.py"
    blocked.write_text("raise ImportError('not installed')")
    code = (
        "from deltapost.errors import MissingExtra\n"
        "from deltapost.ledger import open_ledger\n"
        "try:\n    open_ledger('postgresql://u@h/d')\n"
        "except MissingExtra as error:\n    print(error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert "deltapost[postgres]" in done.stdout, done.stderr


def test_a_ledger_without_schema_names_the_command(ledger_url: str) -> None:
    ledger = open_ledger(ledger_url)

    with pytest.raises(WrongRevision, match="deltapost ledger migrate"):
        ledger.check_revision()
    with pytest.raises(WrongRevision, match="deltapost ledger migrate"), ledger.read() as session:
        session.scalars(select(RunRow)).all()
    ledger.close()


def test_a_statement_that_fails_names_no_bound_value(ledger: Ledger) -> None:
    with pytest.raises(LedgerError) as caught, ledger.write() as session:
        session.add(run_row(state="sesame"))

    assert "sesame" not in str(caught.value)
    assert "ck_runs_state_known" in str(caught.value)
