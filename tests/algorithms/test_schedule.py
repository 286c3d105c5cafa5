"""Schedule: each fragment's turn once in H steps, and a grace window from what was measured."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltapost.algorithms.schedule import MovingAverage, RoundTimes, Schedule
from deltapost.errors import ConfigurationError


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    fragments = draw(st.integers(1, 12))
    return Schedule(
        sync_every=draw(st.integers(fragments, 60)),
        fragments=fragments,
        in_flight=draw(st.integers(1, fragments)),
    )


def averages(step: float | None, quorum: float | None, sync: float | None) -> RoundTimes:
    return RoundTimes(MovingAverage(step), MovingAverage(quorum), MovingAverage(sync))


def test_rounds_are_due_at_the_steps_of_the_formula() -> None:
    # Given H = 10 and P = 4: turns at ⌊10/4⌋, ⌊20/4⌋, ⌊30/4⌋ and 10 of every period
    schedule = Schedule(sync_every=10, fragments=4, in_flight=1)

    assert [schedule.round_step(r) for r in range(9)] == [2, 5, 7, 10, 12, 15, 17, 20, 22]


def test_a_single_fragment_is_due_every_sync_every_steps() -> None:
    schedule = Schedule(sync_every=30, fragments=1, in_flight=1)

    assert [step for step in range(1, 91) if schedule.due(step - 1, step)] == [30, 60, 90]


@given(schedules(), st.integers(0, 40))
def test_the_step_of_every_round_is_a_turn_of_its_fragment(schedule: Schedule, number: int) -> None:
    step = schedule.round_step(number)

    assert schedule.due(step - 1, step) == (number % schedule.fragments,)


@given(schedules(), st.integers(0, 500))
def test_in_any_sync_every_steps_each_fragment_has_exactly_one_turn(schedule: Schedule, start: int) -> None:
    # Given a clock past its first period (before it some have had none)
    start += schedule.sync_every
    turns = Counter(
        fragment
        for step in range(start + 1, start + schedule.sync_every + 1)
        for fragment in schedule.due(step - 1, step)
    )

    assert turns == Counter(range(schedule.fragments))


@given(schedules(), st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_a_learner_that_looks_seldom_never_gets_a_fragment_twice_at_once_nor_before_its_turn(
    schedule: Schedule, strides: list[int]
) -> None:
    step = 0
    for stride in strides:
        due = schedule.due(step, step + stride)
        every_step = [f for one in range(step, step + stride) for f in schedule.due(one, one + 1)]
        assert len(set(due)) == len(due)
        assert set(due) == set(every_step)
        step += stride


def test_several_turns_at_once_come_in_the_order_of_their_steps() -> None:
    schedule = Schedule(sync_every=10, fragments=4, in_flight=1)

    # Given steps 6 to 13: turns of fragment 2 (7), 3 (10) and 0 (12)
    assert schedule.due(5, 13) == (2, 3, 0)


@pytest.mark.parametrize(
    ("versions", "step"),
    [([3, 3, 3, 3], 30), ([4, 4, 3, 3], 35), ([9, 2, 2, 2], 20), ([0, 0, 0, 0], 0), ([2, 3, 3, 9], 30)],
)
def test_a_joiner_starts_its_clock_at_the_median_version(versions: list[int], step: int) -> None:
    assert Schedule(sync_every=10, fragments=4, in_flight=1).start_step(versions) == step


def test_a_joiner_needs_the_version_of_every_fragment() -> None:
    with pytest.raises(ConfigurationError, match="3 versions given"):
        Schedule(sync_every=10, fragments=4, in_flight=1).start_step([1, 2, 3])


def test_no_more_rounds_are_outstanding_than_in_flight_allows() -> None:
    schedule = Schedule(sync_every=10, fragments=4, in_flight=2)

    assert [schedule.may_publish(outstanding) for outstanding in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("overlap_steps", "waits"),
    [(None, [False, False, False]), (0, [True, True, True]), (2, [False, False, True])],
)
def test_a_learner_waits_for_the_commit_after_its_overlap_steps(
    overlap_steps: int | None, waits: list[bool]
) -> None:
    schedule = Schedule(sync_every=10, fragments=4, in_flight=2, overlap_steps=overlap_steps)

    assert [schedule.must_wait(steps) for steps in range(3)] == waits


def test_ahead_is_in_flight_gaps_unless_overlap_steps_are_fewer() -> None:
    assert Schedule(10, 4, 2).ahead == 5.0
    assert Schedule(10, 4, 2, overlap_steps=3).ahead == 3
    assert Schedule(10, 4, 2, overlap_steps=8).ahead == 5.0


def test_the_grace_window_is_half_of_the_time_left_before_the_commit_is_needed() -> None:
    # ahead = 2·10/4 = 5 steps of 2 s; quorum and sync take 1 + 3 s; half of the 6 s left is 3 s; a gap is 5 s
    assert Schedule(10, 4, 2).grace_seconds(averages(2.0, 1.0, 3.0)) == 3.0


def test_the_grace_window_is_one_gap_at_most() -> None:
    # ahead = 10 steps of 1 s, nothing else takes time: half is 5 s, but a gap is 2.5 s
    assert Schedule(10, 4, 4).grace_seconds(averages(1.0, 0.0, 0.0)) == 2.5


def test_there_is_no_grace_when_the_round_took_longer_than_learners_can_go_ahead() -> None:
    assert Schedule(10, 4, 1).grace_seconds(averages(1.0, 2.0, 1.0)) == 0.0


def test_plain_diloco_has_no_grace_since_its_learners_wait() -> None:
    assert Schedule(10, 1, 1, overlap_steps=0).grace_seconds(averages(1.0, 0.1, 0.1)) == 0.0


@pytest.mark.parametrize("missing", [(None, 1.0, 1.0), (1.0, None, 1.0), (1.0, 1.0, None)])
def test_there_is_no_grace_while_an_average_is_missing(
    missing: tuple[float | None, float | None, float | None],
) -> None:
    assert Schedule(100, 4, 4).grace_seconds(averages(*missing)) == 0.0


def test_a_moving_average_starts_at_its_first_value_and_takes_over_a_tenth_of_each_change() -> None:
    first = MovingAverage().observed(10.0)

    assert first.value == 10.0
    assert first.observed(20.0).value == pytest.approx(11.0)
    assert first.observed(20.0).observed(1.0).value == pytest.approx(10.0)


def test_round_times_move_only_the_averages_that_were_measured() -> None:
    times = RoundTimes().observed(step=1.0).observed(step=2.0, sync=4.0)

    assert times.step.value == pytest.approx(1.1)
    assert times.sync.value == 4.0
    assert times.quorum.value is None


@pytest.mark.parametrize(
    ("sync_every", "fragments", "in_flight"), [(3, 4, 1), (4, 4, 5), (4, 4, 0), (0, 0, 0), (5, 2, 3)]
)
def test_a_schedule_needs_in_flight_at_most_fragments_at_most_sync_every(
    sync_every: int, fragments: int, in_flight: int
) -> None:
    with pytest.raises(ConfigurationError, match="1 ≤ in_flight ≤ fragments ≤ sync_every"):
        Schedule(sync_every, fragments, in_flight)


def test_overlap_steps_are_not_negative() -> None:
    with pytest.raises(ConfigurationError, match="overlap_steps is -1"):
        Schedule(4, 2, 1, overlap_steps=-1)
