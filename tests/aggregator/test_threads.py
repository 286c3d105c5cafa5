"""However many fragments a run has, the aggregator's threads are few, and idle fragments cost little."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from deltapost.limits import MAX_FRAGMENTS, WORKER_THREADS
from fixtures.fleet import Aggregators
from fixtures.pipeline import arrays
from fixtures.served import eventually

#: Runs (the service's own), fleet, streams, housekeeping; the health server is off here.
OTHER_THREADS = 4


@pytest.fixture
def started_threads() -> Callable[[], int]:
    before = threading.active_count()
    return lambda: threading.active_count() - before


@pytest.fixture
def many(migrated_sqlite_url: str) -> Iterator[Aggregators]:
    """A run of as many fragments as there may be."""
    made = Aggregators(migrated_sqlite_url, fragments=MAX_FRAGMENTS, quorum_size=1)
    yield made
    made.close()


def test_a_thousand_fragments_are_served_by_the_pool_s_threads(
    started_threads: Callable[[], int], many: Aggregators
) -> None:
    served = many.start("only", lease_seconds=60.0)

    eventually(lambda: len(served.holds()) >= 64, seconds=100)

    assert started_threads() <= WORKER_THREADS + OTHER_THREADS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_a_thousand_idle_fragments_closes_its_round_when_its_mail_comes(many: Aggregators) -> None:
    served = many.start("only", lease_seconds=60.0, poll_seconds=1.0)
    eventually(lambda: len(served.holds()) == MAX_FRAGMENTS, seconds=500)

    many.pipeline.post("ada", arrays(1, many.shapes), fragment=700)

    eventually(lambda: many.pipeline.head(700) == 1, seconds=60)
    assert served.problems() == {}
