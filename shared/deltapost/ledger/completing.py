"""Completing: what a ledger lacks of rounds at or below its head, from their records.

A rebuild meets ledgers that were restored in part, or that lost rows. Nothing that is there is changed but
verdicts, which are the record's to give; a round that differs from the bucket's stops it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deltapost.errors import HistoryError
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.rewinding import drop_unanswered
from deltapost.ledger.rounds import answer, next_sequence, participant_rows, round_row
from deltapost.ledger.tables import (
    ContributionRow,
    FragmentRow,
    LearnerKeyRow,
    LearnerRow,
    ParticipantRow,
    RoundRow,
    UnverifiedRow,
)
from deltapost.ledger.writing import insert_missing
from deltapost.serialization.records import Attestation, Observations, Record
from deltapost.streams import START


def complete(ledger: Ledger, lease: Lease, record: Record, attestation: Attestation) -> bool:
    """Adds what the ledger lacks of a round at or below its head; True: something of it was missing.

    A round that was missing left verdicts undecidable: the provisional ones go, and the stream is read again.
    Raises HistoryError when the ledger holds another record or attestation of this version, LeaseLost.
    """
    observations = Observations.from_bytes(attestation.observations)
    data = record.to_bytes()
    sha256 = hashlib.sha256(data).digest()
    with ledger.write() as session:
        hold(session, lease)
        known = session.get(RoundRow, (record.run, record.fragment, record.version))
        if known is not None and (known.record, known.attestation) != (data, attestation.to_bytes()):
            raise HistoryError(
                f"round {record.version} of fragment {record.fragment} of run {record.run!r}: the ledger "
                f"holds another record or attestation than the bucket ({known.record_sha256.hex()[:16]}… and "
                f"{sha256.hex()[:16]}…)",
                hint="find out which was altered; an empty database can be rebuilt from the bucket",
            )
        before = _counts(session, record)
        if known is None:
            drop_unanswered(session, lease)
            sequence = next_sequence(session, lease.run)
            session.add(round_row(record, data, sha256, attestation, observations, sequence))
            session.flush()
            hold(session, lease, position=START)
        present = set(
            session.scalars(
                select(ParticipantRow.learner).where(
                    ParticipantRow.run == record.run,
                    ParticipantRow.fragment == record.fragment,
                    ParticipantRow.version == record.version,
                )
            )
        )
        session.add_all(row for row in participant_rows(record) if row.learner not in present)
        answer(session, ledger, record)
        session.flush()
        return known is None or _counts(session, record) != before


def _counts(session: Session, record: Record) -> tuple[int, ...]:
    """How many rows of the round's participants, answers and counts there are."""
    counts = []
    for table, version in (
        (ParticipantRow, ParticipantRow.version),
        (ContributionRow, ContributionRow.answered_version),
        (UnverifiedRow, UnverifiedRow.version),
    ):
        counts.append(
            session.scalars(
                select(func.count())
                .select_from(table)
                .where(table.run == record.run, table.fragment == record.fragment, version == record.version)
            ).one()
        )
    return tuple(counts)


def add_learners(ledger: Ledger, run: str, public_keys: Mapping[str, bytes]) -> int:
    """Notes the run's learners by the keys in the bucket; returns how many were not known.

    Each counts for quorum from the first version that a record answered it at; one that no record knows, from
    the newest head on. Raises HistoryError where the ledger holds another key.
    """
    with ledger.write() as session:
        rows = session.execute(select(LearnerRow.learner, LearnerRow.public_key).where(LearnerRow.run == run))
        known = {row.learner: row.public_key for row in rows}
        registered = set(session.scalars(select(LearnerKeyRow.learner).where(LearnerKeyRow.run == run)))
        for learner in sorted((known.keys() & public_keys.keys()) - registered):
            if known[learner] != public_keys[learner]:
                raise HistoryError(
                    f"learner {learner!r} of run {run!r}: the ledger holds key "
                    f"{known[learner].hex()[:16]}…, the bucket {public_keys[learner].hex()[:16]}…"
                )
        firsts = session.execute(
            select(ContributionRow.learner, func.min(ContributionRow.version).label("version"))
            .where(ContributionRow.run == run, ContributionRow.answered_version.is_not(None))
            .group_by(ContributionRow.learner)
        )
        answered = {row.learner: row.version for row in firsts}
        newest = session.scalars(select(func.max(FragmentRow.head)).where(FragmentRow.run == run)).one()
        missing = [
            {
                "run": run,
                "learner": learner,
                "public_key": public_keys[learner],
                "first_version": answered.get(learner, newest),
            }
            for learner in sorted(public_keys.keys() - known.keys())
        ]
        insert_missing(session, LearnerRow, missing)
    return len(missing)
