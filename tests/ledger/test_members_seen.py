"""What the members stream said last of each learner is what the ledger says, in whatever order it came."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
from sqlalchemy import Select, select, text

from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import LearnerRow
from deltapost.serialization.messages import AliveMessage, JoinMessage, LeaveMessage, MemberMessage
from fixtures.pipeline import RUN, Pipeline, learner_signing_key
from fixtures.served import eventually


def alive(counter: int, *, learner: str = "ada") -> MemberMessage:
    return AliveMessage(run=RUN, learner=learner, session=1, counter=counter, local_step=10 * counter)


def leave(counter: int) -> MemberMessage:
    return LeaveMessage(run=RUN, learner="ada", session=1, counter=counter)


@pytest.fixture
def admitted(ledger: Ledger) -> Ledger:
    Pipeline(ledger)
    for learner in ("ada", "bob"):
        runs.add_learner(ledger, RUN, learner, learner_signing_key(learner).public)
    return ledger


def seen(ledger: Ledger, learner: str = "ada") -> tuple[int, int, int, bool]:
    with ledger.read() as session:
        row = session.get(LearnerRow, (RUN, learner))
        assert row is not None
        assert (row.last_seen_at is None) == ((row.session, row.counter) == (0, 0))
        return row.session, row.counter, row.local_step, row.left


def test_the_newest_counts_in_any_order_of_one_batch(admitted: Ledger) -> None:
    for number, order in enumerate(permutations(range(3))):
        base = 1 + 3 * number
        messages = [alive(base), leave(base + 1), alive(base + 2)]

        runs.member_seen(admitted, [messages[index] for index in order])

        assert seen(admitted) == (1, base + 2, 10 * (base + 2), False)


def test_who_left_last_has_left(admitted: Ledger) -> None:
    runs.member_seen(admitted, [leave(5), alive(4), alive(2, learner="bob")])

    assert seen(admitted) == (1, 5, 40, True)
    assert seen(admitted, "bob") == (1, 2, 20, False)


def test_what_is_older_changes_nothing_and_a_new_session_starts_over(admitted: Ledger) -> None:
    runs.member_seen(admitted, [alive(7)])
    runs.member_seen(admitted, [alive(3), leave(6)])
    assert seen(admitted) == (1, 7, 70, False)

    runs.member_seen(admitted, [JoinMessage(run=RUN, learner="ada", session=2, counter=0)])
    runs.member_seen(admitted, [])

    assert seen(admitted) == (2, 0, 70, False)


@pytest.mark.parametrize("message", [alive(3), leave(3)], ids=["alive", "leave"])
def test_two_aggregators_that_note_the_same_learners_never_wait_in_a_circle(
    migrated_postgres_url: str, message: MemberMessage
) -> None:
    # Given another aggregator's transaction that has ada's row
    ledger = open_ledger(migrated_postgres_url)
    Pipeline(ledger)
    for learner in ("ada", "bob"):
        runs.add_learner(ledger, RUN, learner, learner_signing_key(learner).public)

    def row(learner: str) -> Select[tuple[LearnerRow]]:
        return select(LearnerRow).where(LearnerRow.learner == learner)

    def waits() -> bool:
        locked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with ledger.read() as session:
            return bool(session.execute(text(locked)).scalar_one())

    with ThreadPoolExecutor(1) as pool:
        with ledger.write() as session:
            session.scalars(row("ada").with_for_update()).one()

            # When this one notes both, and waits for it
            noted = pool.submit(runs.member_seen, ledger, [alive(2, learner="bob"), message])
            eventually(waits)

            # Then it has nothing that the other may want next
            session.scalars(row("bob").with_for_update(nowait=True)).one()
        noted.result(timeout=20)
    assert seen(ledger)[1] == 3
    assert seen(ledger, "bob")[1] == 2
    ledger.close()
