"""A run that is finished tells its learners so, and leaves none of their contributions unanswered."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from deltapost.cli.main import app
from deltapost.errors import RunFinished
from deltapost.learner.journal import Journal
from deltapost.ledger import ending
from deltapost.serialization.names import commits_stream
from fixtures.served import CLAIMS, Served, algorithm, eventually, small_model


def journal(served: Served, learner: str = "ada") -> Journal:
    return Journal(served.directory / "state" / "runs" / "tiny" / learner / "journal")


def served_at_last(served: Served) -> None:
    """The aggregator has found the run."""
    eventually(lambda: ending.state(served.ledger, "tiny") is not None)


def finished(served: Served) -> None:
    """Somebody finishes the run, and the aggregator does it."""
    served_at_last(served)
    ending.request(served.ledger, "tiny")
    eventually(lambda: ending.state(served.ledger, "tiny") == "finished")


def test_a_loop_ends_by_itself_and_its_open_contribution_is_answered(served: Served) -> None:
    # Given a learner whose contribution waits for a quorum that never comes
    with served.join(small_model(), algorithm(quorum_size=2, min_quorum=2)) as run:
        receipt = run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert not run.finished

        # When the run is finished
        finished(served)

        # Then it is told, and nothing is left open
        eventually(lambda: run.finished)
        assert run.align(wait_seconds=60.0) == []
        assert not run.wait_for(0, 1, timeout=60.0)
        assert run.due() == []
        assert run.publish_final() == []
        with pytest.raises(RunFinished, match="fragment 1 of run 'tiny' has ended"):
            run.publish_contribution(1, 0, delta=small_model(0.5), **CLAIMS)
        again = run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert (again.envelope, again.repeated) == (receipt.envelope, True)
    kept = journal(served)
    entry = kept.find(0, 0)
    assert kept.unanswered() == []
    assert entry is not None
    assert entry.answered


def test_a_barrier_that_waits_for_a_commit_ends_with_the_run(served: Served) -> None:
    model = small_model()
    with served.join(model, algorithm(quorum_size=2, min_quorum=2, overlap_steps=0)) as run:
        run.count_step(tokens=1, seconds=0.1)
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        waiting = threading.Thread(target=run.align)
        waiting.start()

        finished(served)

        waiting.join(timeout=30)
        assert not waiting.is_alive()


def test_the_last_round_is_taken_over_before_the_end(served: Served) -> None:
    model = small_model()
    with served.join(model, algorithm()) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert run.wait_for(0, 1, timeout=20)
        run.publish_contribution(1, 0, delta=small_model(0.5), **CLAIMS)
        assert run.wait_for(1, 1, timeout=20)

        finished(served)

        eventually(lambda: run.finished)
        assert run.versions == [1, 1]


def test_a_learner_that_joins_a_finished_run_is_told_and_gets_its_last_anchors(served: Served) -> None:
    # Given a learner that died with an open contribution, and a run that was finished meanwhile
    with served.join(small_model(1.0), algorithm(quorum_size=2, min_quorum=2)) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
    finished(served)
    model = small_model(7.0)

    # When it comes back
    with pytest.raises(RunFinished, match=r"run 'tiny' is finished.*versions \[0, 0\]"):
        served.join(model)

    # Then its journal is settled and its model is the run's
    assert journal(served).unanswered() == []
    np.testing.assert_array_equal(model["a"], np.ones((4, 5), np.float32))


def test_without_its_announcement_the_end_is_found_by_those_who_wait(served: Served) -> None:
    with served.join(small_model(), algorithm(quorum_size=2, min_quorum=2)) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        run._courier._end_probe_at = 0.0
        finished(served)
        served.log.trim(commits_stream("tiny"), "9999999999999-0")

        def told() -> bool:
            run._courier._end_probe_at = 0.0
            return run.finished

        eventually(told)


def test_an_aggregator_serves_a_finished_run_no_more(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()
    finished(served)
    served.stop()

    service = served.start()
    with pytest.raises(RunFinished):
        served.join(small_model(), learner="bob")

    eventually(lambda: "tiny" in service._discovery._finished)
    assert service._fleet.holdings("tiny") == []


def test_the_command_finishes_a_run_and_shows_it(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()
    served_at_last(served)
    path = next(served.directory.glob("*.db"))
    flags = ["--ledger", f"sqlite:///{path}", "--json"]

    shown = json.loads(CliRunner().invoke(app, ["run", "show", "tiny", *flags]).output)
    assert (shown["state"], shown["finish_requested"]) == ("active", False)
    done = CliRunner().invoke(app, ["run", "finish", "tiny", "--wait", "60", *flags])

    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["state"] == "finished"
    shown = json.loads(CliRunner().invoke(app, ["run", "show", "tiny", *flags]).output)
    assert [fragment["ended"] for fragment in shown["fragments"]] == [True, True]
    listed = json.loads(CliRunner().invoke(app, ["run", "list", *flags]).output)
    assert listed["runs"] == [{"run": "tiny", "state": "finished", "fragments": 2, "rounds": 0}]
