"""Garbage collection reads no record again that its own process has read back and attested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.serialization.names import anchor_key
from deltapost_aggregator import garbage
from deltapost_aggregator.garbage import NamedKeys
from deltapost_aggregator.housekeeping import Housekeeper
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import RUN, Pipeline, healthy
from fixtures.requests import CountedStore

ROUNDS = 3


@pytest.fixture
def pipeline(migrated_sqlite_url: str) -> Iterator[tuple[Pipeline, CountedStore, Ledger]]:
    ledger = open_ledger(migrated_sqlite_url)
    store = CountedStore()
    yield Pipeline(ledger, store=store), store, ledger
    ledger.close()


def one_pass(keeper: Housekeeper) -> None:
    keeper.step()
    while keeper._units:
        keeper.step()


def test_a_pass_over_its_own_rounds_only_lists(pipeline: tuple[Pipeline, CountedStore, Ledger]) -> None:
    # Given a process that closed some rounds, and an object that none of them names
    made, store, _ = pipeline
    context = made.context()
    worker = FragmentWorker(context, 0)
    for version in range(ROUNDS):
        healthy(made, version)
        made.run_to(version + 1, worker)
    orphan = anchor_key(RUN, 0, 1, bytes(32))
    store.put(orphan, b"x")
    store.asked.clear()

    # When it collects garbage, then that goes, and no record was read for it
    one_pass(Housekeeper(context))
    assert orphan not in [info.key for info in store.list(f"{RUN}/anchors/")]
    assert store.asked["get records"] == store.asked["get attestations"] == 0

    # And another process reads each once
    store.asked.clear()
    one_pass(Housekeeper(made.context()))
    assert store.asked["get records"] == store.asked["get attestations"] == ROUNDS


def test_what_is_remembered_is_bounded(
    pipeline: tuple[Pipeline, CountedStore, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = pipeline
    healthy(made)
    made.run_to(1)
    record = made.record(1)
    named = NamedKeys()
    keys = len(named.note(record).kept)
    monkeypatch.setattr(garbage, "REMEMBERED_KEYS", 3 * keys)

    for version in range(1, 20):
        named.note(record.model_copy(update={"version": version}))
        named.note(record.model_copy(update={"version": version}))

    assert [base for base in range(20) if named.of(0, base) is not None] == [16, 17, 18]
    assert named._count == 3 * keys
