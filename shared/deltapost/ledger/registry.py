"""The registry of learner keys in the ledger: an index of the bucket's entries, by their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select

from deltapost.algorithms.key_history import KeyHistory
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import FragmentRow, LearnerKeyRow
from deltapost.ledger.writing import insert_missing
from deltapost.serialization.records import Manifest
from deltapost.stores.registry import StoredEntry


def index(ledger: Ledger, run: str, entries: Sequence[StoredEntry]) -> None:
    """Writes entries read from the bucket; those that are there stay as they are."""
    if not entries:
        return
    with ledger.write() as session:
        insert_missing(
            session,
            LearnerKeyRow,
            [
                {
                    "run": run,
                    "number": stored.entry.number,
                    "learner": stored.entry.learner,
                    "action": stored.entry.action,
                    "public_key": stored.entry.public_key,
                    "from_version": stored.entry.from_version,
                    "entry": stored.data,
                    "entry_sha256": stored.sha256,
                }
                for stored in entries
            ],
        )


def load(ledger: Ledger, manifest: Manifest) -> KeyHistory:
    """The indexed entries, each verified again. Raises MalformedMessage, SignatureRefused, ForkedHistory."""
    with ledger.read() as session:
        rows = session.scalars(
            select(LearnerKeyRow.entry)
            .where(LearnerKeyRow.run == manifest.run)
            .order_by(LearnerKeyRow.number)
        ).all()
    history = KeyHistory(manifest)
    for data in rows:
        stored = StoredEntry.read(data, manifest, number=history.number + 1, previous=history.head)
        history.add(stored.entry, stored.sha256)
    return history


def highest_head(ledger: Ledger, run: str) -> int:
    """The newest version that any fragment of the run has reached."""
    with ledger.read() as session:
        return session.scalars(select(func.max(FragmentRow.head)).where(FragmentRow.run == run)).one() or 0
