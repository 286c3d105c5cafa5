"""Whatever happens to an aggregator between any two steps, the records are those of an undisturbed run.

Killed, paused while another takes over, or left without a reply; with the database restored from an old copy
in between. The whole matrix runs in `make test-all`, a sample of it in `make test`.
"""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from deltapost import points
from deltapost.ledger.engine import Ledger
from deltapost.points import nothing
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import envelope_stream
from deltapost.streams import START
from fixtures.history import announcements, check_whole, history
from fixtures.pipeline import RUN, arrays, learner_signing_key
from fixtures.playing import MODES, Killed, Mode, Player, Undisturbed
from fixtures.scripts import PLAIN, READABLE, RECOVERIES, ROUNDS, Script, new_pipeline

#: Every so many cases one runs in `make test`; coprime to every dimension of the matrix.
SAMPLE = 41


def matrix() -> list[ParameterSet]:
    """Every mode at every point, first and second time through where there is one, on both databases."""
    cases = [
        (database, mode, script, point, times_through)
        for mode in MODES
        for script in (READABLE if mode == "stop_restored" else PLAIN, *RECOVERIES)
        if script.restorable or mode != "stop_restored"
        for point in script.points
        for times_through in script.times
        for database in ("sqlite", "postgresql")
    ]
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{case[2].name}-{case[3]}-{case[4]}",
            marks=[] if number % SAMPLE == 0 else [pytest.mark.slow],
        )
        for number, case in enumerate(cases)
    ]


def test_the_matrix_holds_every_point_of_an_aggregator() -> None:
    named = {
        point for name, group in vars(points).items() if name.endswith("POINTS") for point in group
    } - set(points.LEARNER_POINTS)

    assert {point for script in (PLAIN, *RECOVERIES) for point in script.points} == named


@pytest.mark.parametrize(
    ("migrated_url", "mode", "script", "point", "times_through"), matrix(), indirect=["migrated_url"]
)
def test_a_fault_at_any_step_changes_no_record_and_no_row(
    ledger: Ledger, undisturbed: Undisturbed, mode: Mode, script: Script, point: str, times_through: int
) -> None:
    restored = mode == "stop_restored"
    expected = undisturbed(script, restored)
    pipeline = new_pipeline(script, ledger)
    player = Player(pipeline, script)

    player.fail(mode, point, times_through)

    assert player.faults == 1
    assert history(pipeline, restored=restored) == expected
    check_whole(pipeline)


def test_killed_at_every_step_in_turn_it_still_comes_out_the_same(
    ledger: Ledger, undisturbed: Undisturbed
) -> None:
    expected = undisturbed(PLAIN, False)
    pipeline = new_pipeline(PLAIN, ledger)
    pending = list(PLAIN.points)

    def reach(point: str) -> None:
        if point in pending:
            pending.remove(point)
            raise Killed(point)

    Player(pipeline, PLAIN).play(reach)

    assert pending == []
    assert history(pipeline) == expected
    check_whole(pipeline)


def test_the_stream_is_trimmed_only_behind_what_a_record_answered(ledger: Ledger) -> None:
    pipeline = new_pipeline(PLAIN, ledger)
    Player(pipeline, PLAIN).play(nothing)
    payload = pipeline.payload(arrays(5))
    unanswered = sign_message(pipeline.message("ada", payload, version=ROUNDS), learner_signing_key("ada"))

    pipeline.append(unanswered)

    left = pipeline.log.read(envelope_stream(RUN, 0), START, limit=1000)
    assert [entry.data for entry in left] == [unanswered.frame]
    assert sorted(announcements(pipeline)) == [1, 2, 3]
