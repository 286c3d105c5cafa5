"""Checkpoints: the versions whose anchor and outer state lie in the bucket; what lies between is recomputed.

Version v is a checkpoint where `checkpoint_every` divides it. Version 0 always is one: its anchor is the
genesis, its outer state zeros. Records name anchor and outer state of every version by hash, so whatever was
recomputed is compared; they say of themselves whether the objects are there.
"""

from __future__ import annotations

from deltapost.errors import HistoryError
from deltapost.serialization.records import Record


def is_checkpoint(version: int, every: int) -> bool:
    """Whether anchor and outer state of this version are uploaded.

    >>> [version for version in range(8) if is_checkpoint(version, 3)]
    [0, 3, 6]
    """
    return version % every == 0


def checkpoint_of(version: int, every: int) -> int:
    """The newest checkpoint at or below this version: where its state is computed from.

    >>> [checkpoint_of(version, 3) for version in range(8)]
    [0, 0, 0, 3, 3, 3, 6, 6]
    """
    return version - version % every


def check_checkpoint(record: Record, every: int) -> None:
    """Raises HistoryError for a record that says otherwise of its objects than the manifest does."""
    expected = is_checkpoint(record.version, every)
    if record.checkpoint != expected:
        raise HistoryError(
            f"record {record.version} of fragment {record.fragment} of run {record.run!r} says "
            f"checkpoint={record.checkpoint}, by the manifest (checkpoint_every={every}) it is {expected}",
            hint="no aggregator of this run wrote it: keep a copy as evidence",
        )
