"""A name is one process's: a second one of it takes nothing, says so, and follows when the first is gone."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from deltapost.ledger import fleet, leases, suspects
from deltapost.ledger.engine import Ledger
from deltapost.ledger.fleet import NameHeld, Renewed
from deltapost.ledger.tables import AggregatorRow, AggregatorRunRow
from fixtures.fleet import FRAGMENTS, Aggregators
from fixtures.pipeline import RUN, Pipeline
from fixtures.served import eventually

ALL = list(range(FRAGMENTS))


def renew(ledger: Ledger, token: str, *, seconds: float = 60.0, runs: tuple[str, ...] = ()) -> object:
    return fleet.renew(ledger, "ada", token, runs=runs, leases=(), seconds=seconds)


def test_a_name_is_another_s_only_once_it_was_given_back_or_ran_out(ledger: Ledger) -> None:
    assert renew(ledger, "first") == Renewed(frozenset())
    held = renew(ledger, "second")
    assert isinstance(held, NameHeld)
    later = renew(ledger, "second")
    assert later == held  # asking does not prolong it

    fleet.leave(ledger, "ada", "second", leases=())  # nor does somebody else's goodbye end it
    assert renew(ledger, "first", seconds=-1.0) == Renewed(frozenset())
    assert renew(ledger, "second") == Renewed(frozenset())
    assert isinstance(renew(ledger, "first"), NameHeld)

    fleet.leave(ledger, "ada", "second", leases=())
    assert renew(ledger, "first") == Renewed(frozenset())


def test_the_runs_that_are_served_are_said_and_taken_back(ledger: Ledger) -> None:
    Pipeline(ledger)
    renew(ledger, "first", runs=(RUN,))
    assert fleet.look(ledger, "bob", [RUN], settled_seconds=60.0).serving == {"ada": {RUN}}

    renew(ledger, "first")

    look = fleet.look(ledger, "bob", [RUN], settled_seconds=60.0)
    assert (look.serving, look.settled, look.fragments) == ({"ada": frozenset()}, frozenset(), {RUN: 1})
    assert fleet.look(ledger, "bob", [RUN], settled_seconds=0.0).settled == {"ada"}


def test_who_follows_an_orderly_goodbye_need_not_be_careful(ledger: Ledger) -> None:
    # Given an owner that read nothing, and gave its fragment back
    Pipeline(ledger)
    renew(ledger, "first", runs=(RUN,))
    lease = leases.acquire(ledger, RUN, 0, "ada", take_own=True)
    assert lease is not None
    suspects.begin(ledger, lease)
    fleet.leave(ledger, "ada", "first", leases=(lease.token,))

    # When the next one begins at the same position, then nobody has died there
    following = leases.acquire(ledger, RUN, 0, "bob", take_own=False)
    assert following is not None
    assert not suspects.begin(ledger, following).careful


def test_who_gives_its_name_back_leaves_no_row(ledger: Ledger) -> None:
    Pipeline(ledger)
    renew(ledger, "first", runs=(RUN,))

    fleet.leave(ledger, "ada", "first", leases=())

    with ledger.read() as session:
        assert session.scalars(select(AggregatorRow)).all() == []
        assert session.scalars(select(AggregatorRunRow)).all() == []


def test_two_living_processes_of_one_name_are_told_and_only_the_first_serves(
    aggregators: Aggregators, caplog: pytest.LogCaptureFixture
) -> None:
    first = aggregators.start("twin")
    eventually(lambda: first.holds() == ALL, seconds=60)

    second = aggregators.start("twin")

    eventually(
        lambda: "another living process is named 'twin'" in second.problems().get("name", ""), seconds=60
    )
    assert "aggregator_name_taken" in caplog.text
    assert (first.holds(), second.holds()) == (ALL, [])
    assert first.problems() == {}

    # And once the first is gone, the second has the name and everything else
    first.stop()
    eventually(lambda: second.holds() == ALL, seconds=60)
    eventually(lambda: second.problems() == {})


@pytest.mark.slow
def test_a_process_started_again_after_a_kill_takes_its_fragments_when_the_lease_ends(
    aggregators: Aggregators,
) -> None:
    killed = aggregators.start("same")
    eventually(lambda: killed.holds() == ALL, seconds=60)
    killed.die()
    aggregators.post(0)

    again = aggregators.start("same")

    aggregators.reach_heads(1)
    assert again.holds() == ALL
    assert again.problems() == {}


@pytest.mark.slow
def test_one_that_slept_through_its_own_restart_gives_way_to_it(aggregators: Aggregators) -> None:
    sleeping = aggregators.start("same")
    eventually(lambda: sleeping.holds() == ALL, seconds=60)
    sleeping.going.clear()
    restarted = aggregators.start("same")
    eventually(lambda: restarted.holds() == ALL, seconds=60)

    sleeping.going.set()

    eventually(lambda: "another living process" in sleeping.problems().get("name", ""), seconds=60)
    eventually(lambda: sleeping.holds() == [])
    aggregators.post(0)
    aggregators.reach_heads(1)
    assert restarted.holds() == ALL
