"""An entry that kills its reader is skipped after so many starts, and counted; the others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from deltapost.errors import StoreUnavailable
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import FragmentRow, SuspectRow
from deltapost.limits import MAX_STARTS_AT_ENTRY
from deltapost.serialization.messages import SignedMessage, read_message
from deltapost.serialization.names import envelope_stream, manifest_key
from deltapost_aggregator import intake
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, plain_config

KILLER = b"\xc1 kills whoever reads it"


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, everything the worker held is dropped."""


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """Reading KILLER raises the newest of these."""
    raised: list[type[BaseException]] = [Killed]

    def read(frame: bytes) -> SignedMessage:
        if frame.startswith(KILLER):
            raise raised[-1]
        return read_message(frame)

    monkeypatch.setattr(intake, "read_message", read)
    return raised


@pytest.fixture
def ledger(migrated_sqlite_url: str) -> Any:
    from deltapost.ledger.engine import open_ledger

    opened = open_ledger(migrated_sqlite_url)
    yield opened
    opened.close()


def suspects(ledger: Ledger) -> dict[int, int]:
    """Starts by fragment."""
    with ledger.read() as session:
        return {row.fragment: row.starts for row in session.scalars(select(SuspectRow))}


def poison(pipeline: Pipeline, suffix: bytes = b"", fragment: int = 0) -> None:
    pipeline.log.append(envelope_stream(RUN, fragment), KILLER + suffix)


def play(pipeline: Pipeline, head: int, start: Callable[[], FragmentWorker], *, deaths: int = 60) -> int:
    """Steps workers until the head is reached, a new one after each death; returns the deaths."""
    worker, died = start(), 0
    for _ in range(400):
        if pipeline.head() >= head:
            return died
        try:
            worker.step()
        except Killed:
            died += 1
            assert died <= deaths, f"{died} deaths"
            worker = start()
    raise AssertionError(f"still at version {pipeline.head()}")


def test_an_entry_that_kills_its_readers_is_skipped_and_everybody_else_merged(
    ledger: Ledger, deadly: list[type[BaseException]]
) -> None:
    # Given a batch in whose middle an entry kills
    pipeline = Pipeline(ledger)
    for number in range(20):
        pipeline.log.append(envelope_stream(RUN, 0), b"noise %d" % number)
    pipeline.post(LEARNERS[0], arrays(1))
    poison(pipeline)
    for number, learner in enumerate(LEARNERS[1:]):
        pipeline.post(learner, arrays(number + 2))

    died = play(pipeline, 1, pipeline.worker)

    # Then the first death is met by care, which finds the entry; so many starts later it is skipped
    assert died == 1 + MAX_STARTS_AT_ENTRY
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)
    assert pipeline.record(1).unverified == {"malformed": 21}
    assert pipeline.unverified() == {(1, "malformed"): 21}
    assert suspects(ledger) == {0: MAX_STARTS_AT_ENTRY}


def test_the_same_bytes_posted_again_are_skipped_at_once_and_others_are_found_anew(
    ledger: Ledger, deadly: list[type[BaseException]]
) -> None:
    pipeline = Pipeline(ledger)
    poison(pipeline)
    healthy(pipeline)
    play(pipeline, 1, pipeline.worker)
    for _ in range(5):
        poison(pipeline)
    healthy(pipeline, version=1)

    assert play(pipeline, 2, pipeline.worker) == 0

    poison(pipeline, b" too")
    healthy(pipeline, version=2)
    assert play(pipeline, 3, pipeline.worker) == 1 + MAX_STARTS_AT_ENTRY
    assert pipeline.record(2).unverified == {"malformed": 5}
    assert pipeline.record(3).unverified == {"malformed": 1}


def test_a_death_that_no_entry_caused_leaves_no_suspect(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    with pytest.raises(Killed):
        pipeline.worker(reach=_die_at("intake.read")).step()

    worker = pipeline.worker()
    for _ in range(3):
        worker.step()

    assert pipeline.head() == 1
    assert suspects(ledger) == {}


def _die_at(point: str) -> Callable[[str], None]:
    def reach(here: str) -> None:
        if here == point:
            raise Killed

    return reach


def test_no_row_is_written_for_entries_while_nobody_dies(ledger: Ledger, monkeypatch: Any) -> None:
    from deltapost.ledger import suspects as module

    noted: list[bytes] = []
    monkeypatch.setattr(module, "note", lambda _ledger, _lease, entry: noted.append(entry) or 0)
    pipeline = Pipeline(ledger)
    worker = pipeline.worker()
    healthy(pipeline)
    pipeline.run_to(1, worker)
    worker.stop()

    healthy(pipeline, version=1)
    pipeline.run_to(2, pipeline.worker())

    assert noted == []


def test_a_restart_in_order_is_no_death(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    worker = pipeline.worker()
    worker.step()
    worker.stop()

    following = pipeline.worker()
    following.step()

    assert following._intake.limit > 1
    with ledger.read() as session:
        assert session.get(FragmentRow, (RUN, 0)).started_position == "0-0"  # type: ignore[union-attr]


def test_an_exception_that_nobody_foresaw_stops_the_stream_no_longer_than_a_death(
    ledger: Ledger, deadly: list[type[BaseException]]
) -> None:
    deadly.append(MemoryError)
    pipeline = Pipeline(ledger)
    poison(pipeline)
    healthy(pipeline)
    worker = pipeline.worker()
    failures = 0
    for _ in range(20):
        if pipeline.head():
            break
        try:
            worker.step()
        except MemoryError:
            failures += 1

    assert failures == 1 + MAX_STARTS_AT_ENTRY
    assert pipeline.record(1).unverified == {"malformed": 1}
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)


class Away:
    """A store that answers nothing of the run's own; reads of deltas end as `reading` says."""

    def __init__(self, inner: Any, reading: BaseException) -> None:
        self._inner = inner
        self._reading = reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def head(self, key: str) -> Any:
        if key == manifest_key(RUN):
            raise StoreUnavailable("away")
        return self._inner.head(key)

    def get(self, key: str, **keywords: Any) -> Any:
        if "/deltas/" in key:
            raise self._reading
        return self._inner.get(key, **keywords)


@pytest.mark.parametrize(
    "reading",
    [
        pytest.param(StoreUnavailable("away"), id="refused"),
        pytest.param(Killed(), id="hanging, until a supervisor kills whoever hangs with it"),
    ],
)
def test_restarts_while_the_store_is_away_are_held_against_no_entry(
    ledger: Ledger, reading: BaseException
) -> None:
    pipeline = Pipeline(ledger)
    posted = pipeline.post("ada", arrays(1))
    inner = pipeline.store
    with pytest.raises(Killed):
        pipeline.worker(reach=_die_at("intake.read")).step()

    pipeline.store = Away(inner, reading)  # type: ignore[assignment]
    for _ in range(3 * MAX_STARTS_AT_ENTRY):
        with pytest.raises((Killed, StoreUnavailable)):
            pipeline.worker().step()
    assert suspects(ledger) == {}

    pipeline.store = inner
    pipeline.worker().step()
    assert pipeline.verdict(posted) == "accepted"


def test_an_entry_that_fails_for_now_is_counted_once_a_start_and_cleared(ledger: Ledger) -> None:
    """A payload that cannot be read yet holds its entry up: that is no death."""
    pipeline = Pipeline(ledger)
    pipeline.post("ada", arrays(1))
    inner = pipeline.store

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def get(self, key: str, **keywords: Any) -> Any:
            if "/deltas/" in key:
                raise StoreUnavailable("later")
            return inner.get(key, **keywords)

    with pytest.raises(Killed):
        pipeline.worker(reach=_die_at("intake.read")).step()
    pipeline.store = Failing()
    worker = pipeline.worker()
    for _ in range(3 * MAX_STARTS_AT_ENTRY):
        with pytest.raises(StoreUnavailable):
            worker.step()

    assert suspects(ledger) == {}


def test_an_owner_that_loses_its_lease_again_and_again_blames_no_entry(ledger: Ledger) -> None:
    # Given a fragment whose owner died, and a slow process that loses its lease over each entry
    pipeline = Pipeline(ledger)
    posted = pipeline.post("ada", arrays(1))
    with pytest.raises(Killed):
        pipeline.worker(reach=_die_at("intake.read")).step()
    losing = True

    def reach(point: str) -> None:
        if point == "intake.payload_checked" and losing:
            with ledger.write() as session:
                session.execute(update(FragmentRow).values(lease_token=None))

    context = pipeline.context(reach)
    for _ in range(3 * MAX_STARTS_AT_ENTRY):
        assert FragmentWorker(context, 0).step() == "not_owner"

    # When it keeps the lease at last
    losing = False
    FragmentWorker(context, 0).step()

    # Then the honest entry is read
    assert pipeline.verdict(posted) == "accepted"
    assert suspects(ledger) == {}


def test_a_death_in_one_fragment_is_blamed_on_no_entry_of_another(
    ledger: Ledger, deadly: list[type[BaseException]]
) -> None:
    """Two fragments in one process: the deadly one ends both; the other's entries are read all the same."""
    pipeline = Pipeline(ledger, config=plain_config(fragments=2, in_flight=2))
    poison(pipeline)
    healthy(pipeline)
    for number, learner in enumerate(LEARNERS):
        pipeline.post(learner, arrays(number + 1), fragment=1)
    for _ in range(30):
        context = pipeline.context()
        workers = [FragmentWorker(context, 1), FragmentWorker(context, 0)]
        try:
            for _ in range(12):
                # What a death meets of the other fragment: its lease just taken, nothing read yet.
                workers[0]._hold_lease()
                workers[1].step()
            break
        except Killed:
            continue
    workers[0].step()
    pipeline.settle(workers[0])

    assert suspects(ledger) == {0: MAX_STARTS_AT_ENTRY}
    assert (pipeline.head(0), pipeline.head(1)) == (1, 1)
    assert pipeline.record(1, fragment=1).unverified == {}
