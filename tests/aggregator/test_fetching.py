"""The payloads of a batch come side by side; what is decided, and in what order, stays the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from deltapost.ledger.engine import Ledger
from fixtures.pipeline import LEARNERS, Pipeline, arrays, plain_config


class Meeting:
    """The pipeline's store, in which reads of deltas wait for each other."""

    def __init__(self, inner: Any, parties: int) -> None:
        self._inner = inner
        self._barrier = threading.Barrier(parties, timeout=60)
        self.read: list[str] = []

    def get(self, key: str, **keywords: Any) -> Any:
        if "/deltas/" in key:
            self.read.append(key)
            self._barrier.wait()
        return self._inner.get(key, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_batch_s_payloads_are_fetched_side_by_side_and_each_once(ledger: Ledger) -> None:
    # Given a store that serves a delta only while two others are read, too
    pipeline = Pipeline(ledger)
    for number, learner in enumerate(LEARNERS):
        pipeline.post(learner, arrays(number))
    store = Meeting(pipeline.store, len(LEARNERS))
    pipeline.store = store  # type: ignore[assignment]

    # When the round is taken and closed, then that ends, and no delta was read twice
    pipeline.run_to(1, pipeline.worker(transfer_threads=len(LEARNERS)))
    assert len(store.read) == len(set(store.read)) == len(LEARNERS)


@pytest.mark.parametrize("threads", [1, 4])
def test_of_a_learner_that_posts_many_only_the_next_is_fetched_ahead(ledger: Ledger, threads: int) -> None:
    """Its first is accepted, so that its others are conflicts, which cost no read."""
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=2))
    for number in range(20):
        pipeline.post("ada", arrays(number), local_step=100 + number)
    pipeline.post("bob", arrays(50))
    store = Meeting(pipeline.store, 1)
    pipeline.store = store  # type: ignore[assignment]

    pipeline.run_to(1, pipeline.worker(transfer_threads=threads))

    assert len(store.read) == 2
