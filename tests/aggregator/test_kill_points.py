"""Killed between any two steps and started again, an aggregator writes the records of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.points import ROUND_POINTS
from deltapost.serialization.messages import CommitMessage, read_message, sign_message
from deltapost.serialization.names import commits_stream, envelope_stream
from deltapost.streams import START
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, learner_signing_key, plain_config

ROUNDS = 3


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, everything the worker held is dropped."""


def killer(point: str, times_through: int) -> Callable[[str], None]:
    left = times_through

    def reach(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left == 0:
                raise Killed(point)

    return reach


def script(pipeline: Pipeline, version: int) -> None:
    """What the learners post for a round: healthy, doubled, contradicting, late, worthless and unreadable."""
    for number, learner in enumerate(LEARNERS):
        signed = pipeline.post(learner, arrays(10 * version + number), version=version)
        if number == 0:
            pipeline.append(signed)
            pipeline.post(learner, arrays(500 + version), version=version)
            pipeline.post("mallory", arrays(600 + version), version=version, steps=0)
            pipeline.log.append(envelope_stream(RUN, 0), b"\xc1 no message")
            if version:
                pipeline.post("mallory", arrays(700 + version), version=version - 1)


def play(pipeline: Pipeline, reach: Callable[[str], None]) -> int:
    """Plays the script with one worker; each time it is killed, a new one starts. Returns the kills."""
    kills = 0
    worker = pipeline.worker(reach=reach)
    for version in range(ROUNDS):
        script(pipeline, version)
        for _ in range(60):
            if pipeline.head() > version:
                break
            try:
                worker.step(0.0)
            except Killed:
                kills += 1
                worker = pipeline.worker(reach=reach)
        else:
            raise AssertionError(f"round {version} did not close")
    for _ in range(3):  # the announcement of the last round may still be due
        try:
            worker.step(0.0)
        except Killed:
            kills += 1
            worker = pipeline.worker(reach=reach)
    return kills


History = tuple[list[bytes], dict[str, list[tuple[object, ...]]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Records and ledger of the same script without a kill."""
    ledger = open_ledger(f"sqlite:///{tmp_path_factory.mktemp('undisturbed') / 'ledger.db'}")
    migrate(ledger)
    pipeline = new_pipeline(ledger)
    assert play(pipeline, lambda _point: None) == 0
    dump = pipeline.dump()
    ledger.close()
    return pipeline.records(), dump


def new_pipeline(ledger: Ledger) -> Pipeline:
    pipeline = Pipeline(ledger, config=plain_config(commit_dtype="BF16", delta_dtype="F8_E4M3"))
    pipeline.register("mallory")
    return pipeline


def matrix() -> list[ParameterSet]:
    """Every point, first and second time through, on both databases; half of it only in `make test-all`."""
    cases = []
    for number, point in enumerate(ROUND_POINTS):
        for times_through in (1, 2):
            for database in ("sqlite", "postgresql"):
                sampled = (number + times_through + (database == "sqlite")) % 2 == 0
                cases.append(
                    pytest.param(
                        database,
                        point,
                        times_through,
                        id=f"{database}-{point}-{times_through}",
                        marks=[] if sampled else [pytest.mark.slow],
                    )
                )
    return cases


@pytest.mark.parametrize(("migrated_url", "point", "times_through"), matrix(), indirect=["migrated_url"])
def test_a_kill_at_any_step_changes_no_record_and_no_row(
    ledger: Ledger, undisturbed: History, point: str, times_through: int
) -> None:
    records, dump = undisturbed
    pipeline = new_pipeline(ledger)

    kills = play(pipeline, killer(point, times_through))

    assert kills == 1
    assert pipeline.records() == records
    assert pipeline.dump() == dump


def test_killed_at_every_step_in_turn_it_still_comes_out_the_same(
    ledger: Ledger, undisturbed: History
) -> None:
    records, dump = undisturbed
    pipeline = new_pipeline(ledger)
    pending = list(ROUND_POINTS)

    def reach(point: str) -> None:
        if point in pending:
            pending.remove(point)
            raise Killed(point)

    kills = play(pipeline, reach)

    assert kills == len(ROUND_POINTS)
    assert pending == []
    assert pipeline.records() == records
    assert pipeline.dump() == dump


def test_whatever_was_killed_every_commit_is_announced(ledger: Ledger) -> None:
    pipeline = new_pipeline(ledger)

    play(pipeline, killer("announce.before", 2))

    entries = pipeline.log.read(commits_stream(RUN), START, limit=1000)
    messages = [read_message(entry.data or b"").message for entry in entries]
    announced = {message.version for message in messages if isinstance(message, CommitMessage)}
    assert announced == {1, 2, 3}


def test_the_stream_is_trimmed_only_behind_what_a_record_answered(ledger: Ledger) -> None:
    pipeline = new_pipeline(ledger)
    play(pipeline, lambda _point: None)
    payload = pipeline.payload(arrays(5))
    unanswered = sign_message(pipeline.message("ada", payload, version=ROUNDS), learner_signing_key("ada"))

    pipeline.append(unanswered)

    left = pipeline.log.read(envelope_stream(RUN, 0), START, limit=1000)
    assert [entry.data for entry in left] == [unanswered.frame]
