"""Runs, fragments and learners in the ledger: an index of what the bucket says, and who was seen when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Table, Update, and_, bindparam, exists, func, or_, select, update
from sqlalchemy.orm import Session

from deltapost.errors import RunMismatch
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import FragmentEndRow, FragmentRow, LearnerRow, ParticipantRow, RunRow
from deltapost.ledger.writing import insert_missing
from deltapost.serialization.messages import AliveMessage, LeaveMessage, MemberMessage
from deltapost.serialization.records import Manifest


@dataclass(frozen=True)
class Standing:
    """Where a fragment stands: its head with its hash, and the position up to which all is decided."""

    head: int
    head_sha256: bytes
    stream_epoch: str
    position: str
    announced: int
    #: Its end stands in the slot of the next record; somebody asked that the run end.
    ended: bool = False
    finishing: bool = False


def admit(ledger: Ledger, manifest: Manifest) -> bool:
    """Copies a run from its manifest; True when it is new. RunMismatch: another manifest of its name."""
    data = manifest.to_bytes()
    sha256 = manifest.sha256
    with ledger.write() as session:
        new = session.get(RunRow, manifest.run) is None
        if new:  # also for another aggregator that finds the run at the same instant: neither is refused
            row = {
                "run": manifest.run,
                "manifest": data,
                "manifest_sha256": sha256,
                "aggregator_key": manifest.aggregator_key,
                "state": "active",
                "created_at": ledger.now(session),
            }
            insert_missing(session, RunRow, [row])
            insert_missing(
                session,
                FragmentRow,
                [
                    {"run": manifest.run, "fragment": fragment, "head": 0, "head_sha256": sha256}
                    for fragment in range(len(manifest.fragments))
                ],
            )
        known = session.scalars(select(RunRow.manifest_sha256).where(RunRow.run == manifest.run)).one()
        if known != sha256:
            raise RunMismatch(
                f"run {manifest.run!r}: the ledger knows manifest {known.hex()[:16]}…, "
                f"the bucket holds {sha256.hex()[:16]}…",
                hint="one ledger serves one bucket: give each bucket its own database",
            )
    return new


def active(ledger: Ledger) -> list[Manifest]:
    """The manifests of the runs that are to be served."""
    with ledger.read() as session:
        rows = session.scalars(
            select(RunRow.manifest).where(RunRow.state == "active").order_by(RunRow.run)
        ).all()
    return [Manifest.from_bytes(row) for row in rows]


def names(ledger: Ledger) -> set[str]:
    """The runs that this ledger indexes."""
    with ledger.read() as session:
        return set(session.scalars(select(RunRow.run)))


def standing(ledger: Ledger, run: str, fragment: int) -> Standing:
    """The fragment's present row."""
    with ledger.read() as session:
        row = session.execute(
            select(
                FragmentRow.head,
                FragmentRow.head_sha256,
                FragmentRow.stream_epoch,
                FragmentRow.position,
                FragmentRow.announced,
                exists().where(FragmentEndRow.run == run, FragmentEndRow.fragment == fragment),
                finishing(run),
            ).where(FragmentRow.run == run, FragmentRow.fragment == fragment)
        ).one()
    return Standing(*row)


def finishing(run: str) -> ColumnElement[bool]:
    """In SQL: whether somebody asked that the run end.

    The request is lost with an older copy of the database; a fragment that has ended proves that there was
    one, and the others are not to go on without it.
    """
    return or_(
        exists().where(RunRow.run == run, RunRow.finish_requested_at.is_not(None)),
        exists().where(FragmentEndRow.run == run),
    )


def learner_keys(ledger: Ledger, run: str) -> dict[str, bytes]:
    """Public key by learner id, as far as the ledger knows them."""
    with ledger.read() as session:
        rows = session.execute(select(LearnerRow.learner, LearnerRow.public_key).where(LearnerRow.run == run))
        return {row.learner: row.public_key for row in rows}


def add_learner(ledger: Ledger, run: str, learner: str, public_key: bytes) -> None:
    """Notes a learner whose key was read from the bucket; one that is known stays as it is.

    Its first version is the highest head there is: it counts for quorum from the one after that.
    """
    with ledger.write() as session:
        first_version = session.scalars(
            select(func.max(FragmentRow.head)).where(FragmentRow.run == run)
        ).one()
        insert_missing(
            session,
            LearnerRow,
            [
                {
                    "run": run,
                    "learner": learner,
                    "public_key": public_key,
                    "first_version": first_version,
                }
            ],
        )


def first_version(ledger: Ledger, run: str, learner: str) -> int:
    """The version at which the learner was first seen: as noted, or by an earlier round that merged it.

    The rounds come back with the bucket's records where the note is lost. 0 for a learner that is not known.
    """
    with ledger.read() as session:
        noted = session.scalars(
            select(LearnerRow.first_version).where(LearnerRow.run == run, LearnerRow.learner == learner)
        ).one_or_none()
        merged = session.scalars(
            select(func.min(ParticipantRow.version)).where(
                ParticipantRow.run == run, ParticipantRow.learner == learner
            )
        ).one()
    return min([version for version in (noted, merged and merged - 1) if version is not None], default=0)


def newcomers(session: Session, run: str, head: int) -> set[str]:
    """Learners that do not count for the quorum of the round with base `head` yet: see `first_version`."""
    merged_before = exists().where(
        ParticipantRow.run == run,
        ParticipantRow.learner == LearnerRow.learner,
        ParticipantRow.version <= head,
    )
    return set(
        session.scalars(
            select(LearnerRow.learner).where(
                LearnerRow.run == run,
                LearnerRow.first_version > 0,
                LearnerRow.first_version >= head,
                ~merged_before,
            )
        )
    )


def member_seen(ledger: Ledger, messages: list[MemberMessage]) -> None:
    """Notes the newest of each learner's verified messages; older ones change nothing.

    Every aggregator of a run notes the same learners: their rows are locked in one order, so that none waits
    for another in a circle.
    """
    ordered = sorted(messages, key=lambda message: message.learner)
    alive = [message for message in ordered if isinstance(message, AliveMessage)]
    others = [message for message in ordered if not isinstance(message, AliveMessage)]
    # Each kind in one statement; which goes first does not matter, for the counter decides.
    for part in (alive, others):
        if part:
            with ledger.write() as session:
                now = ledger.now(session)
                session.connection().execute(
                    _seen(local_step=part is alive), [_seen_values(message, now) for message in part]
                )


def _seen(*, local_step: bool) -> Update:
    table = LearnerRow.__table__
    assert isinstance(table, Table)
    columns = ("session", "counter", "last_seen_at", "left", *(["local_step"] if local_step else []))
    return (
        update(table)
        .where(
            table.c.run == bindparam("of_run"),
            table.c.learner == bindparam("of_learner"),
            or_(
                table.c.session < bindparam("new_session"),
                and_(
                    table.c.session == bindparam("new_session"), table.c.counter <= bindparam("new_counter")
                ),
            ),
        )
        .values({column: bindparam(f"new_{column}") for column in columns})
    )


def _seen_values(message: MemberMessage, now: datetime) -> dict[str, object]:
    values: dict[str, object] = {
        "of_run": message.run,
        "of_learner": message.learner,
        "new_session": message.session,
        "new_counter": message.counter,
        "new_last_seen_at": now,
        "new_left": isinstance(message, LeaveMessage),
    }
    if isinstance(message, AliveMessage):
        values["new_local_step"] = message.local_step
    return values
