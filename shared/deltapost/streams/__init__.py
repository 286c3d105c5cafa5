"""MessageLog: the doorbell between learners and aggregators. Never a record: it may forget everything.

`open_log(url)` opens `redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port,host:port/service/db` or
`memory://NAME`. All implementations pass one conformance suite (`tests/streams/`).

Failure modes. Anything that keeps Redis from answering is StreamUnavailable (retryable). `append` may land
twice when a reply is lost: readers recognise an envelope by its hash. A stream may lose entries, shrink to
an older copy or vanish: `bounds` and `epoch` let its owner notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

__all__ = ["START", "Bounds", "Entry", "MessageLog", "open_log", "position_key"]

#: The position before the first entry.
START: Final = "0-0"


@dataclass(frozen=True)
class Entry:
    """One entry: its id (`milliseconds-sequence`, as Redis writes it) and the message's bytes.

    `data` is None where the entry exists but holds no message of ours (another field, or a nil reply).
    """

    id: str
    data: bytes | None


@dataclass(frozen=True)
class Bounds:
    """Where a stream stands: its number of entries, first and last entry, and the highest id ever removed."""

    length: int
    first_id: str | None
    last_id: str
    removed_through: str


@runtime_checkable
class MessageLog(Protocol):
    """Append-only streams of bytes with growing ids. Safe to use from several threads."""

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        """Appends and returns the entry's id; `max_length` lets the oldest entries go (approximately)."""

    def read(self, stream: str, after: str, *, limit: int, wait_seconds: float = 0.0) -> list[Entry]:
        """Up to `limit` entries with ids above `after`; waits at most `wait_seconds` for the first one."""

    def ready(self, positions: Mapping[str, str], *, wait_seconds: float = 0.0) -> set[str]:
        """The streams with entries above the position given for each; waits for the first of them.

        One call waits for all: a Redis Cluster would need one for each node, and is not spoken to.
        """

    def bounds(self, stream: str) -> Bounds | None:
        """None when the stream does not exist."""

    def length(self, stream: str) -> int:
        """Entries in the stream; 0 when it does not exist."""

    def trim(self, stream: str, through: str) -> int:
        """Removes the entries up to and including id `through`; returns how many went."""

    def epoch(self, stream: str) -> str | None:
        """The name of the stream's present life; None when nobody has named it."""

    def claim_epoch(self, stream: str, proposed: str) -> str:
        """Names the stream's life if it has no name; returns the name in force (SET NX, then GET)."""

    def replace_epoch(self, stream: str, *, old: str, new: str) -> str:
        """Renames the life if it still is `old` (or has no name); returns the name in force. Atomic."""

    def ping(self) -> None:
        """Raises StreamUnavailable when the server does not answer."""

    def close(self) -> None:
        """Closes connections; the object is not usable afterwards."""


def position_key(entry_id: str) -> tuple[int, int]:
    """The order of entry ids: `"5-10"` is above `"5-9"`."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def open_log(url: str) -> MessageLog:
    """Opens the log that `url` names."""
    from deltapost.streams.opening import open_log as opener

    return opener(url)
