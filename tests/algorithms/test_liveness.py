"""Who is live follows from messages and listening time alone."""

from __future__ import annotations

from typing import Any

from deltapost.algorithms.liveness import Liveness
from deltapost.serialization.messages import AliveMessage, JoinMessage, LeaveMessage, PassMessage


def member(session: int, counter: int, learner: str = "ada") -> dict[str, Any]:
    return {"run": "r", "learner": learner, "session": session, "counter": counter}


def joined(*learners: str, lease: float = 10.0, stall: float | None = None) -> Liveness:
    liveness = Liveness(lease, stall)
    for learner in learners:
        liveness.observe(JoinMessage(**member(1, 0, learner)))
    return liveness


def test_a_learner_is_live_until_its_lease_runs_out() -> None:
    liveness = joined("ada", "bob")

    liveness.listened(9.0)
    liveness.observe(AliveMessage(**member(1, 1, "bob"), local_step=1))
    liveness.listened(2.0)

    assert liveness.live() == {"bob"}


def test_an_outage_of_the_stream_expires_nobody() -> None:
    liveness = joined("ada")

    liveness.listened(0.0)  # however long nobody could listen

    assert liveness.live() == {"ada"}


def test_a_replayed_message_renews_nothing() -> None:
    liveness = joined("ada")
    alive = AliveMessage(**member(1, 5), local_step=1)
    assert liveness.observe(alive)
    liveness.listened(8.0)

    assert not liveness.observe(alive)
    assert not liveness.observe(AliveMessage(**member(1, 4), local_step=2))
    assert not liveness.observe(JoinMessage(**member(0, 99)))
    liveness.listened(8.0)

    assert liveness.live() == frozenset()


def test_a_new_session_counts_from_its_own_start() -> None:
    liveness = joined("ada")
    liveness.observe(AliveMessage(**member(1, 50), local_step=1))
    liveness.observe(LeaveMessage(**member(1, 51)))
    assert liveness.live() == frozenset()

    assert liveness.observe(JoinMessage(**member(2, 0)))

    assert liveness.live() == {"ada"}


def test_a_learner_that_leaves_is_not_waited_for_even_if_it_had_just_contributed() -> None:
    liveness = joined("ada", "bob")

    liveness.observe(LeaveMessage(**member(1, 1)))
    liveness.contributed("ada")

    assert liveness.live() == {"bob"}


def test_a_contribution_renews_the_lease() -> None:
    liveness = joined("ada")
    liveness.listened(8.0)

    liveness.contributed("ada")
    liveness.listened(8.0)

    assert liveness.live() == {"ada"}


def test_a_learner_that_makes_no_steps_stalls_unless_it_waits_at_a_barrier() -> None:
    liveness = joined("ada", "bob", "cyd", lease=10.0, stall=25.0)
    for tick in range(1, 6):
        liveness.listened(8.0)
        liveness.observe(AliveMessage(**member(1, tick, "ada"), local_step=7))
        liveness.observe(AliveMessage(**member(1, tick, "bob"), local_step=7, waiting=True))
        liveness.observe(AliveMessage(**member(1, tick, "cyd"), local_step=tick))

    assert liveness.live() == {"bob", "cyd"}


def test_learners_that_wait_for_each_other_at_different_barriers_are_not_waited_for() -> None:
    # Given two learners, each at the barrier of a fragment that the other has not published
    liveness = joined("ada", "bob", lease=10.0, stall=25.0)

    def both_wait(seconds: float, tick: int) -> None:
        liveness.listened(seconds)
        for learner in ("ada", "bob"):
            liveness.observe(AliveMessage(**member(1, tick, learner), local_step=7, waiting=True))

    # When neither makes a step for so long that it would count as stalled
    for tick in range(1, 4):
        both_wait(8.0, tick)
    assert liveness.live() == {"ada", "bob"}
    both_wait(10.0, 4)
    both_wait(8.0, 5)

    # Then none of them holds a round open, until one goes on
    assert liveness.live() == frozenset()
    liveness.observe(AliveMessage(**member(1, 6, "bob"), local_step=8))
    assert liveness.live() == {"ada", "bob"}


def test_a_pass_speaks_of_one_round_of_one_fragment() -> None:
    liveness = joined("ada")
    liveness.observe(PassMessage(**member(1, 1), fragment=2, version=7))

    assert liveness.passed(2, 7) == {"ada"}
    assert liveness.passed(2, 8) == frozenset()
    assert liveness.passed(1, 7) == frozenset()
