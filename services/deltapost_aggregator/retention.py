"""Letting go: the signed note that a span of rounds is kept no longer, before anything of it is deleted.

The note is what lets an audit tell retention from tampering: `RUN/retention/FRAGMENT/V`, create-once, signed
by the run's key. After it, garbage collection deletes what it covers, now or after a restart. Only the newest
note counts, as it covers what earlier ones did.
"""

from __future__ import annotations

import contextlib

from deltapost.algorithms.checkpoints import checkpoint_of
from deltapost.algorithms.retention import Retain, worth_releasing
from deltapost.audit.history import Attested, BucketHistory
from deltapost.errors import HistoryError, ObjectConflict, StoreError
from deltapost.events import events
from deltapost.ledger import upkeep
from deltapost.ledger.engine import Ledger
from deltapost.serialization.names import record_key, retention_key
from deltapost.serialization.retention import Released, RetentionNote
from deltapost.serialization.signing import SigningKey

logger = events(__name__)


def planned(
    ledger: Ledger, history: BucketHistory, fragment: int, retain: Retain, *, at_once: bool
) -> Released | None:
    """What the policy lets go of the fragment beyond what is let go already; None: nothing, or not yet.

    A span ends at a checkpoint: what comes after it is computed from there.

    `at_once`: any round counts; otherwise it waits until a span is worth a note.
    """
    head, allowed = upkeep.releasable(ledger, history.run, fragment, retain)
    through = checkpoint_of(allowed, history.checkpoint_every)
    before = history.released(fragment)
    reached = before.through if before is not None else 0
    if through <= reached or not (at_once or worth_releasing(head, reached, through)):
        return None
    found = history.read(fragment, through)
    if not isinstance(found, Attested):
        raise HistoryError(
            f"the record {record_key(history.run, fragment, through)!r} is not there or not attested, "
            f"and the ledger's head is {head}",
            hint="one ledger serves one bucket: check DELTAPOST_STORE and DELTAPOST_LEDGER_URL",
        )
    return Released(
        run=history.run,
        manifest=history.manifest_sha256,
        fragment=fragment,
        through=through,
        record=found.sha256,
        policy=str(retain),
    )


def note(history: BucketHistory, released: Released, key: SigningKey) -> Released:
    """Writes the note, create-once, and reads back what counts. Raises SignatureRefused, StoreError."""
    name = retention_key(released.run, released.fragment, released.through)
    with contextlib.suppress(ObjectConflict):  # another owner's policy says it in other words
        history.store.put(name, RetentionNote.make(released, key).to_bytes())
    found = history.released(released.fragment)
    if found is None or found.through < released.through:
        raise StoreError(f"the retention note {name!r} was written and cannot be read back")
    logger.info(
        "rounds_released",
        extra={
            "run": released.run,
            "fragment": released.fragment,
            "through": released.through,
            "policy": released.policy,
        },
    )
    return found
