"""The ledger's tables: an index of what the bucket's records and attestations say, and the protocol's state.

*History* columns are fixed by a record or its attestation: they can be rebuilt from the bucket, and the
audit compares them with it. *State* columns are what the aggregators are doing now, or advice until a
record answers.

Hashes are 32 raw bytes, times are aware UTC, floats are finite: `ledger.columns` says how. The schema is
created by `deltapost.migrations` only; a test holds it equal to these classes.
"""

from __future__ import annotations

from deltapost.ledger.tables.base import NAMING_CONVENTION, RUN_STATES, Base
from deltapost.ledger.tables.ends import FragmentEndRow
from deltapost.ledger.tables.history import ContributionRow, ParticipantRow, RoundRow, UnverifiedRow
from deltapost.ledger.tables.keys import LearnerKeyRow
from deltapost.ledger.tables.state import (
    AggregatorRow,
    AggregatorRunRow,
    FragmentRow,
    LearnerRow,
    RunRow,
    SealRow,
    SuspectRow,
)

__all__ = [
    "NAMING_CONVENTION",
    "RUN_STATES",
    "AggregatorRow",
    "AggregatorRunRow",
    "Base",
    "ContributionRow",
    "FragmentEndRow",
    "FragmentRow",
    "LearnerKeyRow",
    "LearnerRow",
    "ParticipantRow",
    "RoundRow",
    "RunRow",
    "SealRow",
    "SuspectRow",
    "UnverifiedRow",
]
