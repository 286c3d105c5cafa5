"""Chain: what a record has to be to stand in a fragment's slot, and to follow the one before it."""

from __future__ import annotations

from deltapost.algorithms.checkpoints import check_checkpoint
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import ForkedHistory
from deltapost.serialization.ends import FragmentEnd
from deltapost.serialization.names import record_key
from deltapost.serialization.records import Record


def check_slot(plan: RunPlan, found: Record | FragmentEnd, fragment: int, version: int) -> None:
    """ForkedHistory unless it is of this run, fragment and version; HistoryError: a wrong checkpoint."""
    expected = (plan.run, plan.manifest_sha256, fragment, version)
    if (found.run, found.manifest, found.fragment, found.version) != expected:
        key = record_key(plan.run, fragment, version)
        raise ForkedHistory(f"the object {key!r} is the record of another run, fragment or version")
    if isinstance(found, Record):
        check_checkpoint(found, plan.config.checkpoint_every)


def check_link(record: Record, previous: bytes) -> None:
    """ForkedHistory unless `record` follows the one with that hash."""
    if record.previous != previous:
        raise ForkedHistory(
            f"record {record.version} of fragment {record.fragment} follows {record.previous.hex()[:16]}…, "
            f"version {record.version - 1} was {previous.hex()[:16]}…"
        )
