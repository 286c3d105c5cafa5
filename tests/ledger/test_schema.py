"""Both databases refuse what no record could say, and keep exactly what they accept."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, timezone
from itertools import product
from typing import Any

import pytest
from sqlalchemy import func, inspect, select, text

from deltapost.errors import LedgerError, NonFinite
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import (
    Base,
    ContributionRow,
    LearnerRow,
    ParticipantRow,
    RoundRow,
    RunRow,
    UnverifiedRow,
)
from deltapost.serialization.verdicts import UNVERIFIED_REASONS, VERDICTS
from fixtures.ledger_rows import (
    RUN,
    WHEN,
    contribution_row,
    fragment_row,
    learner_row,
    participant_row,
    round_row,
    run_row,
    seal_row,
    sha,
    unverified_row,
)


def add(ledger: Ledger, *rows: Any) -> None:
    with ledger.write() as session:
        for row in rows:
            session.add(row)
            session.flush()


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """A run with one fragment, a learner and a round with one participant."""
    add(ledger, run_row(), fragment_row(), learner_row(), round_row(), participant_row())
    return ledger


REFUSED = {
    "an empty run id": (lambda: run_row(run=""), "ck_runs_run_length"),
    "a run id of 65 characters": (lambda: run_row(run="r" * 65), "ck_runs_run_length|too long"),
    "a run in an unknown state": (lambda: run_row(run="b", state="lost"), "ck_runs_state_known"),
    "a short manifest hash": (lambda: run_row(run="b", manifest_sha256=b"short"), "manifest_sha256_32_bytes"),
    "a sequence that starts at 0": (lambda: run_row(run="b", next_sequence=0), "next_sequence_minimum"),
    "a fragment of no run": (lambda: fragment_row(run="nobody"), "fk_fragments_runs|FOREIGN KEY"),
    "a negative head": (lambda: fragment_row(1, head=-1), "ck_fragments_head_minimum"),
    "a learner of no run": (lambda: learner_row(run="nobody"), "fk_learners_runs|FOREIGN KEY"),
    "a public key of 31 bytes": (lambda: learner_row("bob", public_key=b"k" * 31), "public_key_32_bytes"),
    "a verdict for strangers, who are only counted": (
        lambda: contribution_row(verdict="bad_signature"),
        "ck_contributions_verdict_known",
    ),
    "an unknown verdict": (lambda: contribution_row(verdict="fine"), "ck_contributions_verdict_known"),
    "a delivery count of 0": (lambda: contribution_row(deliveries=0), "deliveries_minimum"),
    "a base below 0": (lambda: contribution_row(version=-1), "ck_contributions_version_minimum"),
    "a contribution to no fragment": (
        lambda: contribution_row(fragment=9),
        "fk_contributions_fragments|FOREIGN KEY",
    ),
    "steps that took negative time": (lambda: contribution_row(step_seconds=-1.0), "step_seconds_finite"),
    "an unknown reason": (lambda: unverified_row(reason="late"), "ck_unverified_reason_known"),
    "a seal of version 0": (lambda: seal_row(version=0), "ck_seals_version_minimum"),
    "a round of version 0": (lambda: round_row(0, sequence=5), "ck_rounds_version_minimum"),
    "two rounds with one sequence": (lambda: round_row(2, sequence=1), "uq_rounds_run_sequence|UNIQUE"),
    "a round that merged nobody": (
        lambda: round_row(2, participants=0, cosine=None),
        "ck_rounds_participants_minimum",
    ),
    "a mean cosine of 2": (lambda: round_row(2, cosine=2.0), "ck_rounds_cosine_range"),
    "a mean cosine of one delta": (lambda: round_row(2, participants=1), "ck_rounds_cosine_needs_two"),
    "two deltas without mean cosine": (lambda: round_row(2, cosine=None), "ck_rounds_cosine_needs_two"),
    "a participant of no round": (
        lambda: participant_row(version=9),
        "fk_participants_rounds|FOREIGN KEY",
    ),
    "a participant twice": (lambda: participant_row(), "pk_participants|UNIQUE"),
    "a weight of 0": (lambda: participant_row("bob", weight=0.0), "ck_participants_weight_finite"),
    "a negative norm": (lambda: participant_row("bob", norm=-1.0), "ck_participants_norm_finite"),
    "a cosine of -1.5": (lambda: participant_row("bob", cosine=-1.5), "ck_participants_cosine_range"),
    "a participant without steps": (lambda: participant_row("bob", steps=0), "ck_participants_steps_minimum"),
}


def test_the_database_refuses_by_a_named_constraint(filled: Ledger) -> None:
    # What is refused leaves nothing, so that one ledger serves all cases.
    answers: dict[str, str] = {}
    for what, (build, _) in REFUSED.items():
        try:
            add(filled, build())
        except LedgerError as error:
            answers[what] = str(error)

    unexpected = {
        what: answers.get(what, "taken")
        for what, (_, constraint) in REFUSED.items()
        if not re.search(constraint, answers.get(what, ""))
    }
    assert unexpected == {}


def test_a_number_that_is_not_finite_is_refused_before_the_driver(filled: Ledger) -> None:
    for number in (math.nan, math.inf, -math.inf):
        for row in (
            contribution_row(loss=number),
            contribution_row(metrics={"accuracy": number}),
            round_row(2, cosine=number),
            participant_row("bob", norm=number),
        ):
            with pytest.raises(NonFinite):
                add(filled, row)


def test_a_number_that_is_not_finite_is_refused_by_the_database_itself(filled: Ledger) -> None:
    # SQLite has no NaN, and reads 9e999 as infinity.
    literals = ["9e999", "-9e999"] if filled.dialect == "sqlite" else ["'NaN'", "'Infinity'", "'-Infinity'"]
    columns = ["loss", "weight", "norm", "cosine", "step_seconds"]

    for column, literal in product(columns, literals):
        with pytest.raises(LedgerError, match=f"ck_participants_{column}"), filled.write() as session:
            session.execute(text(f"UPDATE participants SET {column} = {literal}"))


def test_every_finite_float64_comes_back_as_it_was(filled: Ledger) -> None:
    numbers = {"a": 1.7976931348623157e308, "b": -1.7976931348623157e308, "c": 5e-324, "d": 0.1}
    add(filled, *(participant_row(learner, loss=number) for learner, number in numbers.items()))

    with filled.read() as session:
        stored = select(ParticipantRow.learner, ParticipantRow.loss).where(ParticipantRow.learner != "ann")
        assert dict(session.execute(stored).all()) == numbers


def test_a_learner_has_one_accepted_contribution_to_a_round(filled: Ledger) -> None:
    # Given an accepted one and any number of others
    add(filled, contribution_row("one"), contribution_row("two", verdict="conflict"))
    add(filled, contribution_row("three", verdict="missing"), contribution_row("four", learner="bob"))

    with pytest.raises(LedgerError, match=r"uq_contributions_accepted|UNIQUE"):
        add(filled, contribution_row("five"))

    # But its next base is another slot
    add(filled, contribution_row("six", version=1))


def test_every_verdict_that_a_record_can_list_can_be_stored(filled: Ledger) -> None:
    add(filled, *(contribution_row(verdict, verdict=verdict) for verdict in VERDICTS))


def test_envelopes_that_are_not_listed_are_counted_by_reason_and_learner(filled: Ledger) -> None:
    for reason in UNVERIFIED_REASONS:
        add(filled, unverified_row(reason=reason), unverified_row(reason=reason, learner="ann"))

    with filled.read() as session:
        assert session.scalar(select(func.sum(UnverifiedRow.count))) == 2 * 3 * len(UNVERIFIED_REASONS)


def test_times_come_back_as_utc(ledger: Ledger) -> None:
    # Given a midnight at +05:00
    midnight = datetime(2026, 12, 1, tzinfo=timezone(timedelta(hours=5)))
    add(ledger, run_row(created_at=midnight))

    with ledger.read() as session:
        stored = session.scalars(select(RunRow.created_at)).one()
        found = session.scalar(select(RunRow.run).where(RunRow.created_at == midnight))

    assert stored == midnight
    assert stored.tzinfo is UTC
    assert found == RUN


def test_a_time_without_zone_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="no time zone"):
        add(ledger, run_row(created_at=WHEN.replace(tzinfo=None)))


@pytest.mark.parametrize(
    "hostile",
    [
        "'; DROP TABLE runs; --",
        "nul\x00inside",
        "a lone \ud800 surrogate",
        "two\nlines\x1b[31m",
        "é" * 10_000,
    ],
    ids=["sql", "nul", "surrogate", "control", "long"],
)
def test_no_text_of_a_stranger_keeps_a_verdict_from_being_stored(filled: Ledger, hostile: str) -> None:
    add(filled, contribution_row(verdict="malformed", detail=hostile))

    with filled.read() as session:
        stored = session.scalars(select(ContributionRow.detail)).one()
        assert session.scalars(select(RunRow.run)).one() == RUN

    assert stored is not None
    assert stored.isprintable()
    assert stored[:3] == hostile[:3]
    assert len(stored) <= 500


def test_metrics_hashes_and_flags_keep_their_types(filled: Ledger) -> None:
    add(filled, contribution_row(metrics={"accuracy": 0.1, "z": 2.0}, final=True))

    with filled.read() as session:
        row = session.scalars(select(ContributionRow)).one()
        unset = session.execute(text("SELECT count(*) FROM participants WHERE metrics IS NULL")).scalar_one()

    assert row.metrics == {"accuracy": 0.1, "z": 2.0}
    assert row.final is True
    assert row.payload_sha256 == sha("payload")
    assert unset == 1


def test_counters_reach_two_to_the_53(filled: Ledger) -> None:
    add(filled, participant_row("bob", tokens=2**53, payload_size=2**53))
    add(filled, learner_row("bob", counter=2**53, session=2**53))

    with filled.read() as session:
        assert session.scalar(select(LearnerRow.counter).where(LearnerRow.learner == "bob")) == 2**53


def test_every_constraint_of_the_classes_is_in_the_database(ledger: Ledger) -> None:
    with ledger.read() as session:
        found = inspect(session.connection())
        for table in Base.metadata.sorted_tables:
            in_database = {check["name"] for check in found.get_check_constraints(table.name)}
            declared = {
                str(constraint.name)
                for constraint in table.constraints
                if constraint.__visit_name__ in ("check_constraint", "table_or_column_check_constraint")
                # Postgres has real booleans, so only SQLite needs a check for them.
                and not (ledger.dialect == "postgresql" and str(constraint.name).endswith("_bool"))
            }
            assert in_database == declared, table.name


def test_every_table_says_what_is_history_and_what_is_state() -> None:
    for mapper in Base.registry.mappers:
        told = (mapper.class_.__doc__ or "").lower()
        assert "history" in told or "state throughout" in told, mapper.class_


def test_a_round_can_be_deleted_only_without_its_participants(filled: Ledger) -> None:
    def delete_the_round() -> None:
        with filled.write() as session:
            session.delete(session.scalars(select(RoundRow)).one())

    with pytest.raises(LedgerError, match=r"fk_participants_rounds|FOREIGN KEY"):
        delete_the_round()
