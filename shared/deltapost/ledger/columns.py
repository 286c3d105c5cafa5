"""Column types and checks that mean the same on SQLite and Postgres, where the databases themselves differ.

SQLite turns a NaN into NULL, drops a time zone without converting and ignores the length of a VARCHAR;
Postgres refuses NUL in text. So values are refused (or, for text that a stranger wrote, made storable)
before the driver sees them, and every check is in the database as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import JSON, CheckConstraint, DateTime, Dialect, Double, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator

from deltapost.errors import LedgerError, NonFinite
from deltapost.limits import MAX_ID_LENGTH

#: Characters kept of a text that explains a verdict; it may quote what a stranger sent.
MAX_DETAIL_LENGTH: Final = 500

_UNSTORABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored in UTC and read back as UTC. A naive one is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise LedgerError(f"the time {value.isoformat()} has no time zone", hint="use datetime.now(UTC)")
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FiniteFloat(TypeDecorator[float]):
    """A float64 that is neither NaN nor infinite; anything else raises NonFinite before the driver."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: float | None, _dialect: Dialect) -> float | None:
        if value is not None and not math.isfinite(value):
            raise NonFinite(f"a ledger column for finite numbers was given {value!r}")
        return value


class Detail(TypeDecorator[str]):
    """One line of text for a person. Control characters and lone surrogates become U+FFFD; long ones are cut.

    It may quote hostile input, and must never be the reason why a verdict cannot be stored.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub("\ufffd", value)[:MAX_DETAIL_LENGTH]


class Metrics(TypeDecorator[dict[str, float]]):
    """A learner's metrics as JSON (JSONB on Postgres): names to finite numbers; None is SQL's NULL."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(JSONB(none_as_null=True))
        return dialect.type_descriptor(JSON(none_as_null=True))

    def process_bind_param(
        self, value: dict[str, float] | None, _dialect: Dialect
    ) -> dict[str, float] | None:
        if value is not None and not all(math.isfinite(number) for number in value.values()):
            raise NonFinite("a contribution's metrics hold a number that is not finite")
        return value


def identifier(column: str, *, may_be_empty: bool = False) -> CheckConstraint:
    """The column holds 1 to 64 characters (0 to 64 with `may_be_empty`)."""
    least = 0 if may_be_empty else 1
    return CheckConstraint(f"length({column}) BETWEEN {least} AND {MAX_ID_LENGTH}", name=f"{column}_length")


def has_32_bytes(column: str) -> CheckConstraint:
    """The column is NULL or holds 32 bytes: a SHA-256, or an Ed25519 public key."""
    return CheckConstraint(f"length({column}) = 32", name=f"{column}_32_bytes")


def at_least(least: int, *columns: str) -> list[CheckConstraint]:
    """Each column is NULL or an integer of at least `least`."""
    return [CheckConstraint(f"{column} >= {least}", name=f"{column}_minimum") for column in columns]


def finite(column: str, *, minimum: str | None = None) -> CheckConstraint:
    """The column is NULL or finite, and within `minimum` (such as `">= 0"`) where that is given.

    An infinity times zero is NaN on Postgres and NULL on SQLite; both differ from zero here.
    """
    check = f"coalesce({column} * 0, 1) = 0"
    bounded = f"{check} AND {column} {minimum}" if minimum else check
    return CheckConstraint(f"{column} IS NULL OR ({bounded})", name=f"{column}_finite")


def cosine_range(column: str) -> CheckConstraint:
    """The column is NULL or in [-1, 1]. Postgres orders NaN above every number, so NaN is refused."""
    return CheckConstraint(f"{column} BETWEEN -1 AND 1", name=f"{column}_range")


def one_of(column: str, words: Sequence[str]) -> CheckConstraint:
    """The column holds one of `words`."""
    listed = ", ".join(f"'{word}'" for word in words)
    return CheckConstraint(f"{column} IN ({listed})", name=f"{column}_known")
