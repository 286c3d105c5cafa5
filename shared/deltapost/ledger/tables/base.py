"""What all tables share: the naming of constraints, and the types of ids and hashes.

Hashes are 32 raw bytes, times are aware UTC, floats are finite: `ledger.columns` says how.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    LargeBinary,
    MetaData,
    String,
)
from sqlalchemy.orm import DeclarativeBase

from deltapost.limits import MAX_ID_LENGTH

NAMING_CONVENTION: Final = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

RUN_STATES: Final = ("active", "paused", "finished")

Id: Final = String(MAX_ID_LENGTH)
Hash: Final = LargeBinary(32)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
