"""Rounds: the transaction that indexes a committed record, and what it leads to.

Everything is written from the record and its attestation, never from the seal or from verdict rows: the
bucket is the record, SQL its index. Indexing a record twice changes nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from deltapost.errors import ForkedHistory, LeaseLost
from deltapost.ledger.counting import count_rows
from deltapost.ledger.engine import Ledger
from deltapost.ledger.leases import Lease, hold
from deltapost.ledger.rewinding import drop_unanswered
from deltapost.ledger.seals import in_force
from deltapost.ledger.tables import (
    ContributionRow,
    FragmentRow,
    ParticipantRow,
    RoundRow,
    RunRow,
    UnverifiedRow,
)
from deltapost.ledger.writing import insert_missing, upsert
from deltapost.serialization.records import Attestation, Observations, Record, SealContent
from deltapost.streams import START


@dataclass(frozen=True)
class Indexed:
    """What indexing a record did. `rewound`: it was not this ledger's seal, so the stream is read again.

    `documents`: the bytes of record and attestation, as they are in the bucket and now in the ledger.
    """

    version: int
    rewound: bool
    documents: tuple[bytes, bytes]


def index(ledger: Ledger, lease: Lease, record: Record, attestation: Attestation) -> Indexed:
    """Writes round, participants, verdicts and head from `record`, and moves the head to its version.

    Raises LeaseLost when another owner went on, ForkedHistory when the record does not continue the head.
    """
    observations = Observations.from_bytes(attestation.observations)
    data = record.to_bytes()
    sha256 = hashlib.sha256(data).digest()
    with ledger.write() as session:
        hold(session, lease)
        head, head_sha256 = session.execute(
            select(FragmentRow.head, FragmentRow.head_sha256).where(
                FragmentRow.run == lease.run, FragmentRow.fragment == lease.fragment
            )
        ).one()
        if head != record.base:
            raise LeaseLost(f"fragment {lease.fragment} of run {lease.run!r} is at version {head} already")
        if record.previous != head_sha256:
            raise ForkedHistory(
                f"record {record.version} of fragment {lease.fragment} of run {lease.run!r} follows "
                f"{record.previous.hex()[:16]}…, the ledger's head is {head_sha256.hex()[:16]}…",
                hint="the ledger belongs to another bucket, or history was altered",
            )
        row = in_force(session, lease.run, lease.fragment, record.version)
        rewound = row is None or not record.follows(SealContent.from_bytes(row.content))
        if rewound:
            drop_unanswered(session, lease)
        sequence = next_sequence(session, lease.run)
        session.add(round_row(record, data, sha256, attestation, observations, sequence))
        session.flush()
        session.add_all(participant_rows(record))
        answer(session, ledger, record)
        moved: dict[str, Any] = {
            "head": record.version,
            "head_sha256": sha256,
            "waiting_reason": None,
            "updated_at": ledger.now(session),
        }
        if rewound:
            moved["position"] = START
        hold(session, lease, **moved)
    return Indexed(record.version, rewound, (data, attestation.to_bytes()))


def next_sequence(session: Session, run: str) -> int:
    """The run's next number, from its counter row: dense, and in commit order over all fragments."""
    session.execute(update(RunRow).where(RunRow.run == run).values(next_sequence=RunRow.next_sequence + 1))
    following: int = session.scalars(select(RunRow.next_sequence).where(RunRow.run == run)).one()
    return following - 1


def round_row(
    record: Record,
    data: bytes,
    sha256: bytes,
    attestation: Attestation,
    observations: Observations,
    sequence: int,
) -> RoundRow:
    """The round's row, from its record and attestation."""
    signed = attestation.to_bytes()
    return RoundRow(
        run=record.run,
        fragment=record.fragment,
        version=record.version,
        sequence=sequence,
        generation=record.generation,
        record=data,
        record_sha256=sha256,
        previous_sha256=record.previous,
        attestation=signed,
        attestation_sha256=hashlib.sha256(signed).digest(),
        participants=len(record.participants),
        degraded=record.degraded,
        cosine=record.cosine,
        anchor_sha256=record.anchor.sha256,
        anchor_size=record.anchor.size,
        outer_sha256=record.outer.sha256,
        outer_size=record.outer.size,
        update_sha256=record.update.sha256 if record.update else None,
        update_size=record.update.size if record.update else None,
        bytes_in=sum(p.payload.size for p in record.participants),
        quorum_seconds=observations.quorum_seconds,
        grace_seconds=observations.grace_seconds,
        close_seconds=observations.close_seconds,
        sync_seconds=observations.sync_seconds,
        owner=observations.owner,
        lease_epoch=observations.lease_epoch,
        committed_at=datetime.fromisoformat(observations.committed_at),
    )


def participant_rows(record: Record) -> list[ParticipantRow]:
    """A row for each contribution that the record merged."""
    return [
        ParticipantRow(
            run=record.run,
            fragment=record.fragment,
            version=record.version,
            learner=p.learner,
            envelope=p.envelope,
            payload_sha256=p.payload.sha256,
            payload_size=p.payload.size,
            local_step=p.local_step,
            steps=p.steps,
            tokens=p.tokens,
            step_seconds=p.step_seconds,
            loss=p.loss,
            metrics=p.metrics,
            final=p.final,
            weight=p.weight,
            norm=p.norm,
            cosine=p.cosine,
        )
        for p in record.participants
    ]


def answer(session: Session, ledger: Ledger, record: Record) -> None:
    """Writes the verdict of every envelope the record answers, and the counts of those it does not list."""
    now = ledger.now(session)
    where = {"run": record.run, "fragment": record.fragment, "answered_version": record.version}
    common = {**where, "message": None, "deliveries": 1, "received_at": now, "metrics": None}
    rows: list[dict[str, object]] = [
        {
            **common,
            "envelope": p.envelope,
            "version": record.base,
            "learner": p.learner,
            "payload_sha256": p.payload.sha256,
            "payload_size": p.payload.size,
            "local_step": p.local_step,
            "steps": p.steps,
            "tokens": p.tokens,
            "step_seconds": p.step_seconds,
            "loss": p.loss,
            "metrics": p.metrics,
            "final": p.final,
            "verdict": "accepted",
        }
        for p in record.participants
    ]
    unknown = dict.fromkeys(
        (
            "payload_sha256",
            "payload_size",
            "local_step",
            "steps",
            "tokens",
            "step_seconds",
            "loss",
            "final",
        )
    )
    rows += [
        {
            **common,
            **unknown,
            "envelope": a.envelope,
            "version": a.version,
            "learner": a.learner,
            "verdict": a.verdict,
        }
        for a in record.answers
    ]
    # Two statements' worth of order: rejections first, so that no slot is held twice for an instant.
    rows.sort(key=lambda row: row["verdict"] == "accepted")
    upsert(session, ContributionRow, rows, replace=("verdict", "answered_version"))
    counts = count_rows(record.run, record.fragment, record.version, record.unverified, record.over_quota)
    insert_missing(session, UnverifiedRow, counts)


def announced(ledger: Ledger, lease: Lease, version: int) -> None:
    """Notes that the commit of `version` is on the commits stream. Raises LeaseLost."""
    with ledger.write() as session:
        hold(session, lease, announced=version)


def documents_of(ledger: Ledger, run: str, fragment: int, version: int) -> tuple[bytes, bytes] | None:
    """The record that produced `version` and its attestation: the bytes that were read from the bucket."""
    with ledger.read() as session:
        row = session.execute(
            select(RoundRow.record, RoundRow.attestation).where(
                RoundRow.run == run, RoundRow.fragment == fragment, RoundRow.version == version
            )
        ).one_or_none()
    return None if row is None else (row.record, row.attestation)


def record_of(ledger: Ledger, run: str, fragment: int, version: int) -> Record | None:
    """The indexed record that produced `version`."""
    with ledger.read() as session:
        data = session.scalars(
            select(RoundRow.record).where(
                RoundRow.run == run, RoundRow.fragment == fragment, RoundRow.version == version
            )
        ).one_or_none()
    return Record.from_bytes(data) if data is not None else None
