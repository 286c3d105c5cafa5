"""A commit whose owner died before it said so is announced by the next one, without a further round."""

from __future__ import annotations

import pytest

from deltapost.ledger.engine import Ledger
from deltapost.serialization.messages import CommitMessage, read_message
from deltapost.serialization.names import attestation_key, commits_stream, record_key
from deltapost.streams import START
from fixtures.pipeline import RUN, Pipeline, arrays, healthy


class Killed(BaseException):
    """Stands for SIGKILL."""


def announced(pipeline: Pipeline) -> list[int]:
    entries = pipeline.log.read(commits_stream(RUN), START, limit=9)
    messages = [read_message(entry.data or b"").message for entry in entries]
    return [one.version for one in messages if isinstance(one, CommitMessage)]


def committed_and_killed(ledger: Ledger) -> Pipeline:
    """A round whose owner died after its transaction, before it announced anything."""
    pipeline = Pipeline(ledger)
    healthy(pipeline)

    def reach(point: str) -> None:
        if point == "announce.before":
            raise Killed

    with pytest.raises(Killed):
        pipeline.run_to(1, pipeline.worker(reach=reach))
    return pipeline


def test_a_commit_that_its_owner_did_not_announce_is_announced_by_the_next(ledger: Ledger) -> None:
    pipeline = committed_and_killed(ledger)

    pipeline.settle()

    assert announced(pipeline) == [1]
    (entry,) = pipeline.log.read(commits_stream(RUN), START, limit=9)
    message = read_message(entry.data or b"").message
    assert isinstance(message, CommitMessage)
    assert message.proof is not None
    assert message.proof.record == pipeline.store.get(record_key(RUN, 0, 1)).data
    assert message.proof.attestation == pipeline.store.get(attestation_key(RUN, 0, 1)).data


def test_it_is_announced_first_however_much_waits_to_be_read(ledger: Ledger) -> None:
    # Given learners that wait for that commit, and a stream on which others go on posting
    pipeline = committed_and_killed(ledger)
    worker = pipeline.worker()
    pipeline.post("ada", arrays(9), version=1)

    # When the next owner comes to its first entry
    steps = [worker.step()]
    while "read" not in steps:
        steps.append(worker.step())

    assert "idle" not in steps
    assert announced(pipeline) == [1]
