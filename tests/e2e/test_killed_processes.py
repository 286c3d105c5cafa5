"""A real aggregator that is killed, stopped or left without a reply at a step leaves history undisturbed.

With Valkey, a directory and both databases. `make test-all` runs the matrix, `make test` a few cases of it.
The matrix of `tests/aggregator/test_kill_points.py` has both times through at both databases for everything;
a case of real processes takes seconds, so this one has what those may add: the processes, at every point.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger
from deltapost.stores.directory import DirectoryStore
from deltapost.streams.redis import RedisLog
from fixtures.history import check_whole, copy_rows, history, restore_rows
from fixtures.pipeline import AGGREGATOR_KEY, RUN, Pipeline
from fixtures.playing import Undisturbed
from fixtures.processes import Forked, Zygote, eventually
from fixtures.scripts import PLAIN, READABLE, RECOVERIES, Script, new_pipeline

#: Every so many cases one runs in `make test`; coprime to every dimension of the matrix.
SAMPLE = 29

#: Points at which a pause tells most when the database is restored meanwhile, by the script that leads there.
RESTORED = {
    "readable": ("record.before_put", "record.put_sent", "round.tx_sent"),
    "littered": ("gc.checked",),
}


def matrix() -> list[ParameterSet]:
    """Every mode at every point with PostgreSQL, amid the run; half of it with SQLite, at the start."""
    passed = [(script, point) for script in (PLAIN, *RECOVERIES) for point in script.points]
    cases: list[tuple[str, str, Script, str, int]] = []
    for shift, mode in enumerate(("kill", "lost", "stop")):
        for number, (script, point) in enumerate(passed):
            if (mode, point) == ("lost", "close.inputs_fetched"):
                continue  # asked again at once: no step fails, and nothing says so
            cases.append(("postgresql", mode, script, point, script.times[-1]))
            if (number + shift) % 2 == 0:  # every point in one mode at least
                cases.append(("sqlite", mode, script, point, script.times[0]))
    cases += [
        (database, "stop_restored", script, point, 2)
        for script in (READABLE, *RECOVERIES)
        for point in RESTORED.get(script.name, ())
        for database in ("sqlite", "postgresql")
    ]
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{case[2].name}-{case[3]}-{case[4]}",
            marks=[] if number % SAMPLE == 0 else [pytest.mark.slow],
        )
        for number, case in enumerate(cases)
    ]


class Aggregators:
    """The aggregator processes of one run; the first fails at `fail_at`."""

    def __init__(self, zygote: Zygote, pipeline: Pipeline, environment: dict[str, str], log: Path) -> None:
        self._zygote = zygote
        self._pipeline = pipeline
        self._environment = environment
        self._log = log
        self._empty = copy_rows(pipeline.ledger)
        self.running: list[Forked] = []
        self.faults = 0
        self._started = 0

    def start(self, name: str, **more: str) -> Forked:
        environment = {**self._environment, "DELTAPOST_AGGREGATOR_NAME": name, **more}
        self.running.append(self._zygote.start("aggregator", environment, self._log))
        self._started += 1
        return self.running[-1]

    def play(self, script: Script, mode: str, point: str, times_through: int) -> None:
        """Plays the script; what was killed is started again, what was stopped goes on a round later."""
        first: Forked | None = None
        for condition in script.play(self._pipeline):
            if first is None:
                fail_at = f"{mode.partition('_')[0]}:{point}:{times_through}"
                first = self.start("first", DELTAPOST_FAIL_AT=fail_at)
            was_stopped = first.stopped

            def turn(condition=condition, first=first) -> bool:  # type: ignore[no-untyped-def]
                self._struck(first, mode)
                return bool(condition())

            eventually(turn, self.said)
            if first.stopped and was_stopped:
                first.send(signal.SIGCONT)
        assert first is not None
        eventually(lambda first=first: self._struck(first, mode), self.said)  # type: ignore[misc]
        if first.stopped:
            first.send(signal.SIGCONT)

    def _struck(self, first: Forked, mode: str) -> bool:
        """Whether the fault has come; at its first sight does what follows it."""
        if not self.faults:
            self._look(first, mode)
        return self.faults == 1

    def _look(self, first: Forked, mode: str) -> None:
        first.look()
        if mode == "lost":
            self.faults += "the reply was lost at" in self.said()
        elif mode == "kill" and first.returncode is not None:
            assert first.returncode == -signal.SIGKILL, self.said()
            self.faults += 1
            self.running.remove(first)
            self.start("first")
        elif first.stopped:
            self.faults += 1
            if mode == "stop_restored" and not self._blocks():
                restore_rows(self._pipeline.ledger, self._empty)
            self.start("second")
            if self._blocks():
                first.send(signal.SIGCONT)

    def _blocks(self) -> bool:
        """Whether the stopped process holds SQLite's one write transaction, in another of its threads.

        Nobody can write before it goes on (the ledger's module says so), so the pause ends here.
        """
        kind, _, path = self._environment["DELTAPOST_LEDGER_URL"].partition(":///")
        if kind != "sqlite":
            return False
        with contextlib.closing(sqlite3.connect(path, timeout=2, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
            except sqlite3.OperationalError:
                return True
        return False

    def end(self) -> None:
        """Ends them in order, once all have started: each finishes its step and exits with 0."""
        eventually(lambda: self.said().count("aggregator_started") == self._started, self.said)
        for process in self.running:
            process.send(signal.SIGTERM)
        for process in self.running:
            assert process.wait() == 0, self.said()

    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


@pytest.mark.parametrize(
    ("migrated_url", "mode", "script", "point", "times_through"), matrix(), indirect=["migrated_url"]
)
def test_a_fault_of_a_real_process_at_any_step_changes_no_record_and_no_row(
    zygote: Zygote,
    ledger: Ledger,
    migrated_url: str,
    valkey_url: str,
    undisturbed: Undisturbed,
    tmp_path: Path,
    mode: str,
    script: Script,
    point: str,
    times_through: int,
) -> None:
    restored = mode == "stop_restored"
    expected = undisturbed(script, restored)
    AGGREGATOR_KEY.save(tmp_path / "aggregator.key")
    log = RedisLog(valkey_url)
    pipeline = new_pipeline(script, ledger, DirectoryStore(tmp_path / "store"), log)
    environment = {
        "DELTAPOST_REDIS_URL": valkey_url,
        "DELTAPOST_STORE": (tmp_path / "store").as_uri(),
        "DELTAPOST_LEDGER_URL": migrated_url,
        "DELTAPOST_SIGNING_KEY_FILE": str(tmp_path / "aggregator.key"),
        "DELTAPOST_AGGREGATOR_HEALTH_PORT": "0",
        "DELTAPOST_POLL_SECONDS": "0.05",
        "DELTAPOST_LEASE_SECONDS": "1",
        **{f"DELTAPOST_{name.upper()}": str(value) for name, value in script.settings.items()},
    }
    aggregators = Aggregators(zygote, pipeline, environment, tmp_path / "aggregator.log")

    aggregators.play(script, mode, point, times_through)

    eventually(lambda: announced_all(pipeline), aggregators.said)
    aggregators.end()
    assert history(pipeline, restored=restored) == expected
    check_whole(pipeline)
    log.close()


def announced_all(pipeline: Pipeline) -> bool:
    """Whether the head is noted as announced: the last thing an owner writes of a round."""
    standing = runs.standing(pipeline.ledger, RUN, 0)
    return standing.announced == standing.head
