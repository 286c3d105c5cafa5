"""`round_audit` shows one row per round, with the same columns and values on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import inspect, select, text

from deltapost.ledger import queries
from deltapost.ledger.audit_view import RoundAudit
from deltapost.ledger.engine import Ledger
from fixtures.ledger_rows import (
    WHEN,
    contribution_row,
    fragment_row,
    learner_row,
    participant_row,
    round_row,
    run_row,
    sha,
    unverified_row,
)


@pytest.fixture
def two_fragments(ledger: Ledger) -> Ledger:
    """Rounds 0, 1 and 2 of a run with two fragments; round 0 answered five envelopes and counted four."""
    with ledger.write() as session:
        session.add_all([run_row(next_sequence=4), run_row(run="other")])
        session.flush()
        session.add_all([fragment_row(0, head=2), fragment_row(1, head=1), fragment_row(run="other")])
        session.add_all([learner_row("ann"), learner_row("bob"), learner_row("cy", left=True)])
        session.flush()
        session.add_all(
            [
                round_row(1, 0, sequence=1, participants=2),
                round_row(1, 1, sequence=2, participants=1, cosine=None, degraded=True),
                round_row(2, 0, sequence=3),
                round_row(1, 0, run="other", sequence=1),
            ]
        )
        session.flush()
        session.add_all(
            [
                participant_row("ann"),
                participant_row("bob"),
                participant_row("ann", fragment=1, loss=None, metrics={"accuracy": 0.5}),
            ]
        )
        verdicts = {"ann": "accepted", "bob": "accepted", "cy": "late", "dee": "stale", "eve": "corrupt"}
        for learner, verdict in verdicts.items():
            session.add(contribution_row(learner, learner=learner, verdict=verdict, answered_version=1))
        # Provisional: no record has answered it yet.
        session.add(contribution_row("open", learner="fay", answered_version=None))
        session.add(unverified_row(count=3))
        session.add(unverified_row(reason="over_quota", learner="ann", count=1))
    return ledger


def test_a_round_shows_its_number_and_counts(two_fragments: Ledger) -> None:
    with two_fragments.read() as session:
        first, second, third = session.scalars(
            select(RoundAudit).where(RoundAudit.run == "tiny").order_by(RoundAudit.sequence)
        ).all()

    assert [row.round for row in (first, second, third)] == [0, 1, 2]
    assert (first.participants, first.degraded, first.cosine) == (2, False, 0.5)
    assert (first.accepted, first.late, first.rejected, first.unverified) == (2, 2, 1, 4)
    assert (second.participants, second.degraded, second.cosine) == (1, True, None)
    assert (second.accepted, second.late, second.rejected, second.unverified) == (0, 0, 0, 0)
    assert first.record_sha256 == sha("record 0 1").hex()
    assert first.committed_at == WHEN
    assert (first.quorum_seconds, first.grace_seconds) == (1.5, 0.5)
    assert (first.close_seconds, first.sync_seconds) == (0.25, 0.125)
    assert (first.bytes_in, first.update_size, first.anchor_size) == (2_000, 600, 4_000)


def test_plain_sql_reads_it_with_the_same_columns_on_both_databases(two_fragments: Ledger) -> None:
    with two_fragments.read() as session:
        columns = [column["name"] for column in inspect(session.connection()).get_columns("round_audit")]
        row = session.execute(text("SELECT * FROM round_audit WHERE run = 'other'")).mappings().one()

    assert columns == [column.name for column in RoundAudit.__table__.columns]
    assert (row["round"], row["accepted"], row["unverified"]) == (0, 0, 0)
    assert type(row["unverified"]) is int


def test_rounds_page_newest_first(two_fragments: Ledger) -> None:
    with two_fragments.read() as session:
        newest = queries.rounds_of(session, "tiny", limit=2)
        rest = queries.rounds_of(session, "tiny", before=newest[-1].sequence, limit=2)
        of_one = queries.rounds_of(session, "tiny", fragment=1, limit=10)

    assert [row.sequence for row in newest] == [3, 2]
    assert [row.sequence for row in rest] == [1]
    assert [(row.fragment, row.version) for row in of_one] == [(1, 1)]


def test_a_round_tells_whom_it_merged_and_what_it_answered(two_fragments: Ledger) -> None:
    with two_fragments.read() as session:
        story = queries.find_round(session, "tiny", 0, 1)
        absent = queries.find_round(session, "tiny", 1, 2)

    assert absent is None
    assert story is not None
    assert [participant.learner for participant in story.participants] == ["ann", "bob"]
    assert {row.learner: row.verdict for row in story.envelopes} == {
        "ann": "accepted",
        "bob": "accepted",
        "cy": "late",
        "dee": "stale",
        "eve": "corrupt",
    }
    assert [(row.reason, row.learner, row.count) for row in story.unverified] == [
        ("bad_signature", "", 3),
        ("over_quota", "ann", 1),
    ]


def test_learners_show_what_was_merged_from_them(two_fragments: Ledger) -> None:
    with two_fragments.read() as session:
        ann, bob, cy = queries.learners_of(session, "tiny")

    assert (ann.learner, ann.merged, ann.steps, ann.tokens, ann.bytes_in) == ("ann", 2, 100, 12_800, 2_000)
    assert (bob.merged, bob.steps) == (1, 50)
    assert (cy.merged, cy.steps, cy.tokens, cy.bytes_in, cy.left) == (0, 0, 0, 0, True)


def test_runs_show_how_far_they_are(two_fragments: Ledger) -> None:
    with two_fragments.read() as session:
        found = {run.run: (run.fragments, run.learners, run.rounds) for run in queries.runs(session)}
        assert queries.find_run(session, "nobody") is None

    assert found == {"tiny": (2, 3, 3), "other": (1, 0, 0)}
