"""Two owners of one round, each with a seal of its own: the record that is there first is everybody's."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import select

from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import RoundRow
from deltapost.serialization.names import delta_key
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays


class Stopped(BaseException):
    """Stands for SIGKILL."""


def test_an_owner_that_writes_second_indexes_the_record_that_is_there(ledger: Ledger) -> None:
    # Given an owner that is stopped before it writes its record, and a payload that is lost meanwhile
    pipeline = Pipeline(ledger)
    posted = [pipeline.post(name, arrays(number)) for number, name in enumerate(LEARNERS, start=1)]
    at_its_write, first_wrote = threading.Event(), threading.Event()

    def second(point: str) -> None:
        if point == "record.before_put":
            at_its_write.set()
            assert first_wrote.wait(30)

    successor = threading.Thread(target=lambda: pipeline.run_to(1, pipeline.worker(reach=second)))

    def first(point: str) -> None:
        if point == "record.before_put":
            payload = pipeline.row(posted[1]).payload_sha256
            assert payload is not None
            pipeline.store.delete(delta_key(RUN, LEARNERS[1], 0, 0, payload))
            successor.start()
            assert at_its_write.wait(30)
        elif point == "record.put_sent":
            raise Stopped

    # When it wakes up and writes, just before the one that took over writes one without the lost payload
    with pytest.raises(Stopped):
        pipeline.run_to(1, pipeline.worker(reach=first))
    first_wrote.set()
    successor.join(60)

    # Then the bucket's record is the ledger's
    record = pipeline.record(1)
    assert [one.learner for one in record.participants] == sorted(LEARNERS)
    with ledger.read() as session:
        assert session.scalars(select(RoundRow.record_sha256)).all() == [record.sha256]
    assert [pipeline.verdict(signed) for signed in posted] == ["accepted"] * len(LEARNERS)
