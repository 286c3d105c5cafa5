"""When a round closes with whom, and where it says why it does not."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Response
from sqlalchemy import select, update

from deltapost.errors import StreamUnavailable
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import FragmentRow, LearnerRow
from deltapost.serialization.messages import LeaveMessage, PassMessage, sign_message
from deltapost.serialization.names import envelope_stream, members_stream
from deltapost.streams import Entry
from deltapost.streams.memory import MemoryLog
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.health import health_app
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.worker import FragmentWorker
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key, plain_config, say


def waiting_reason(ledger: Ledger) -> str | None:
    with ledger.read() as session:
        return session.scalars(select(FragmentRow.waiting_reason)).one()


def readyz(context: RunContext) -> dict[str, Any]:
    app = health_app(context.services.health)
    endpoint = next(route.endpoint for route in app.routes if getattr(route, "path", "") == "/readyz")  # type: ignore[attr-defined]
    answer: dict[str, Any] = endpoint(Response())
    return answer


def member(pipeline: Pipeline, kind: type[Any], learner: str, counter: int, **fields: Any) -> None:
    message = kind(run=RUN, learner=learner, session=1, counter=counter, **fields)
    pipeline.log.append(members_stream(RUN), sign_message(message, learner_signing_key(learner)).frame)


def test_a_waiting_round_says_why_in_ledger_log_and_readiness(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    # Given one contribution of three, and another learner that is live
    pipeline = Pipeline(ledger)
    say(pipeline, "ada", 0)
    say(pipeline, "bob", 0)
    pipeline.post("ada", arrays(1))
    context = pipeline.context()
    MembersReader(context).step()
    worker = FragmentWorker(context, 0)

    # When nothing else comes
    with caplog.at_level("INFO"):
        pipeline.settle(worker)

    # Then all three name who is missing, and the service is ready all the same
    assert waiting_reason(ledger) == "1 of 3 contributions; waiting for bob"
    assert readyz(context)["waiting"] == {f"run {RUN} fragment 0": "1 of 3 contributions; waiting for bob"}
    assert readyz(context)["ready"]
    assert "waiting for bob" in caplog.text

    # And once it closes nothing is said any more
    for learner in LEARNERS[1:]:
        pipeline.post(learner, arrays(2))
    pipeline.run_to(1, worker)
    assert waiting_reason(ledger) is None
    assert readyz(context)["waiting"] == {}


def test_a_round_closes_degraded_once_all_live_learners_reported(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    for learner in ("ada", "bob", "cyd"):
        say(pipeline, learner, 0)
    pipeline.post("ada", arrays(1))
    pipeline.post("bob", arrays(2))
    context = pipeline.context()
    members = MembersReader(context)
    members.step()
    worker = FragmentWorker(context, 0)
    pipeline.settle(worker)
    assert pipeline.head() == 0

    member(pipeline, PassMessage, "cyd", 1, fragment=0, version=0)
    members.step()
    pipeline.run_to(1, worker)

    assert pipeline.record(1).degraded
    assert [participant.learner for participant in pipeline.record(1).participants] == ["ada", "bob"]


class SilentMembers(MemoryLog):
    """A log whose members stream cannot be read while `away`."""

    away = False

    def read(self, stream: str, after: str, *, limit: int, wait_seconds: float = 0.0) -> list[Entry]:
        if self.away and stream == members_stream(RUN):
            raise StreamUnavailable("away")
        return super().read(stream, after, limit=limit, wait_seconds=wait_seconds)


def test_while_the_members_stream_is_away_nobody_s_lease_runs_out(ledger: Ledger) -> None:
    # Given three live learners of whom two have contributed
    log = SilentMembers()
    pipeline = Pipeline(ledger, log=log)
    for learner in LEARNERS:
        say(pipeline, learner, 0)
    for learner in LEARNERS[:2]:
        pipeline.post(learner, arrays(1))
    context = pipeline.context()
    members, worker = MembersReader(context), FragmentWorker(context, 0)
    members.step()

    # When nobody can be heard for longer than a lease
    log.away = True
    pipeline.clock.sleep(2 * context.services.settings.learner_lease_seconds)
    with pytest.raises(StreamUnavailable):
        members.step()
    pipeline.settle(worker)
    log.away = False
    members.step()
    pipeline.settle(worker)

    # Then the third is waited for all the same
    assert pipeline.head() == 0
    assert waiting_reason(ledger) == f"2 of 3 contributions; waiting for {LEARNERS[2]}"


def test_the_last_round_closes_after_those_who_made_it_have_left(ledger: Ledger) -> None:
    # Given a learner that contributed and left, and a fresh aggregator that has heard nobody else
    pipeline = Pipeline(ledger)
    say(pipeline, "ada", 0)
    pipeline.post("ada", arrays(1), final=True)
    member(pipeline, LeaveMessage, "ada", 1)
    context = pipeline.context()
    members = MembersReader(context)
    members.step()
    worker = FragmentWorker(context, 0)

    # Then it waits for a lease's time, in which everyone who is live would have spoken
    pipeline.settle(worker)
    assert pipeline.head() == 0
    assert "who is live is not known yet" in (waiting_reason(ledger) or "")

    # When that has passed, the round closes with whom there is
    pipeline.clock.sleep(context.services.settings.learner_lease_seconds + 1)
    members.step()
    pipeline.run_to(1, worker)
    assert pipeline.record(1).degraded


def test_a_copy_of_a_contribution_keeps_nobody_live(ledger: Ledger) -> None:
    # Given a learner that contributed and has died since
    pipeline = Pipeline(ledger)
    context = pipeline.context()
    members, worker = MembersReader(context), FragmentWorker(context, 0)
    say(pipeline, "ada", 0)
    members.step()
    contribution = pipeline.post("ada", arrays(1))
    pipeline.settle(worker)
    pipeline.clock.sleep(context.services.settings.learner_lease_seconds + 1)
    say(pipeline, "bob", 0)
    members.step()
    assert context.live() == {"bob"}

    # When its contribution comes again, by whoever has seen it
    pipeline.append(contribution, 0)
    pipeline.settle(worker)

    # Then nobody waits for it
    assert context.live() == {"bob"}


def test_an_id_first_seen_at_a_version_does_not_make_its_quorum_and_is_merged_all_the_same(
    ledger: Ledger,
) -> None:
    # Given a round closed by the three old learners, and a fourth that comes at version 1
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    context = pipeline.context()
    worker = FragmentWorker(context, 0)
    pipeline.run_to(1, worker)
    pipeline.register("dan")

    # When it contributes with two of the others
    for number, learner in enumerate(("ada", "bob", "dan")):
        pipeline.post(learner, arrays(20 + number), version=1)
    pipeline.settle(worker)

    # Then there is no quorum yet
    assert pipeline.head() == 1
    assert "2 of 3 contributions (and 1 of learners that are new at this version)" in (
        waiting_reason(ledger) or ""
    )

    # With the third of the old ones there is, and all four are merged
    pipeline.post("cyd", arrays(30), version=1)
    pipeline.run_to(2, worker)
    record = pipeline.record(2)
    assert [participant.learner for participant in record.participants] == ["ada", "bob", "cyd", "dan"]
    assert not record.degraded

    # From the next version on it counts
    for number, learner in enumerate(("ada", "bob", "dan")):
        pipeline.post(learner, arrays(40 + number), version=2)
    pipeline.run_to(3, worker)
    assert len(pipeline.record(3).participants) == 3
    assert not pipeline.record(3).degraded


def test_a_round_that_only_newcomers_fill_closes_degraded(ledger: Ledger) -> None:
    # Given a run at version 1 to which three come that were never there before
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=1))
    pipeline.register("dan")
    pipeline.post("dan", arrays(9))
    pipeline.run_to(1)
    for learner in LEARNERS:
        say(pipeline, learner, 0)
    context = pipeline.context()
    MembersReader(context).step()

    # When all who are live have contributed
    healthy(pipeline, version=1)
    pipeline.run_to(2, FragmentWorker(context, 0))

    # Then the round does not wait for ever for learners that count
    assert pipeline.record(2).degraded
    assert len(pipeline.record(2).participants) == 3


def test_who_was_merged_before_counts_even_when_the_ledger_forgot_when_it_came(ledger: Ledger) -> None:
    pipeline = Pipeline(ledger)
    healthy(pipeline)
    pipeline.run_to(1)
    with ledger.write() as session:
        session.execute(update(LearnerRow).values(first_version=1))

    healthy(pipeline, version=1)
    pipeline.run_to(2)

    assert not pipeline.record(2).degraded


def test_a_stream_that_is_lost_again_and_again_gets_new_names_ever_more_slowly(ledger: Ledger) -> None:
    # Given a stream that vanishes after every step
    pipeline = Pipeline(ledger, log=(log := MemoryLog()))
    worker = pipeline.worker()
    names: list[str | None] = []
    for number in range(50):
        pipeline.post("ada", arrays(number))
        worker.step()
        log._streams.pop(envelope_stream(RUN, 0))
        worker.step()
        pipeline.clock.sleep(0.4)
        names.append(log.epoch(envelope_stream(RUN, 0)))

    # Then in twenty seconds it was renamed at most after 0, 1, 3, 7 and 15 of them
    assert 2 <= len(set(names)) - 1 <= 5


def test_learners_that_hold_each_others_rounds_open_are_not_waited_for_for_ever(
    migrated_sqlite_url: str,
) -> None:
    # Given two learners out of phase, each with its one publication out in another fragment
    ledger = open_ledger(migrated_sqlite_url)
    config = plain_config(fragments=2, in_flight=1, quorum_size=2, stall_after_seconds=1e6)
    pipeline = Pipeline(ledger, config=config)
    for learner in ("ada", "bob"):
        say(pipeline, learner, 0)
    pipeline.post("ada", arrays(1), fragment=0)
    pipeline.post("bob", arrays(2), fragment=1)
    context = pipeline.context()
    members = MembersReader(context)
    workers = [FragmentWorker(context, fragment) for fragment in (0, 1)]

    def turn(seconds: float, counter: int) -> list[int]:
        for learner in ("ada", "bob"):
            say(pipeline, learner, counter)
        members.step()
        for worker in workers:
            worker.step()
            worker.step()
        pipeline.clock.sleep(seconds)
        return [pipeline.head(fragment) for fragment in (0, 1)]

    # Then their rounds wait for a lease's time, and after it one closes with whom it has
    assert turn(20.0, 1) == [0, 0]
    assert turn(20.0, 2) == [0, 0]
    turn(20.0, 3)
    assert sorted(turn(20.0, 4)) == [0, 1]
    closed = turn(20.0, 5).index(1)
    assert pipeline.record(1, closed).degraded

    # And the learner that this set free is waited for by the other, as always
    assert sum(turn(60.0, 6)) == 1
    ledger.close()


def test_who_still_can_come_is_waited_for(migrated_sqlite_url: str) -> None:
    ledger = open_ledger(migrated_sqlite_url)
    config = plain_config(fragments=2, in_flight=1, quorum_size=2, stall_after_seconds=1e6)
    pipeline = Pipeline(ledger, config=config)
    pipeline.post("ada", arrays(1), fragment=0)
    context = pipeline.context()
    members, worker = MembersReader(context), FragmentWorker(context, 0)
    for counter in range(8):
        for learner in ("ada", "bob"):
            say(pipeline, learner, counter)
        members.step()
        worker.step()
        pipeline.clock.sleep(20.0)

    assert pipeline.head() == 0
    ledger.close()
