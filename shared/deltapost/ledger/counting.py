"""Counts of the envelopes that nobody lists: what a seal or an end reads of them, and what a record says.

`over_quota` is counted by learner, every other reason is not: nobody can be held to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import select
from sqlalchemy.orm import Session

from deltapost.ledger.tables import UnverifiedRow
from deltapost.ledger.writing import Row
from deltapost.serialization.verdicts import UnverifiedReason

#: By reason, and of `over_quota` by learner, as records hold them.
Counts: TypeAlias = tuple[dict[UnverifiedReason, int], dict[str, int]]


def counts_for(session: Session, run: str, fragment: int, version: int) -> Counts:
    """What was counted so far for the record of `version`."""
    rows: Sequence[Any] = session.execute(
        select(UnverifiedRow.reason, UnverifiedRow.learner, UnverifiedRow.count).where(
            UnverifiedRow.run == run,
            UnverifiedRow.fragment == fragment,
            UnverifiedRow.version == version,
        )
    ).all()
    return (
        {reason: count for reason, learner, count in rows if not learner},
        {learner: count for _, learner, count in rows if learner},
    )


def count_rows(
    run: str,
    fragment: int,
    version: int,
    unverified: Mapping[UnverifiedReason, int],
    over_quota: Mapping[str, int],
) -> list[Row]:
    """The rows of these counts."""
    return [
        {
            "run": run,
            "fragment": fragment,
            "version": version,
            "reason": reason,
            "learner": learner,
            "count": count,
        }
        for reason, learner, count in [
            *((reason, "", count) for reason, count in unverified.items()),
            *(("over_quota", learner, count) for learner, count in over_quota.items()),
        ]
    ]
