"""A log in this process's memory, for tests and for trying things out.

`memory://NAME` names one log per process: whoever opens the same name reads and writes the same streams.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deltapost.streams import START, Bounds, Entry, position_key
from deltapost.streams.positions import check_position


@dataclass
class _Stream:
    keys: list[tuple[int, int]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    last_id: str = START
    removed_through: str = START

    def remove_first(self, count: int) -> int:
        if count > 0:
            self.removed_through = self.entries[count - 1].id
            del self.keys[:count], self.entries[:count]
        return max(count, 0)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


class MemoryLog:
    """A MessageLog that forgets everything with its process. Ids begin with what `milliseconds` says."""

    def __init__(self, name: str = "", *, milliseconds: Callable[[], int] = _milliseconds) -> None:
        self._name = name
        self._milliseconds = milliseconds
        self._streams: dict[str, _Stream] = {}
        self._epochs: dict[str, str] = {}
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"MemoryLog(memory://{self._name})"

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        with self._changed:
            target = self._streams.setdefault(stream, _Stream())
            milliseconds, sequence = position_key(target.last_id)
            # As in Redis, a clock that was set back continues the last id instead of going below it.
            now = self._milliseconds()
            key = (now, 0) if now > milliseconds else (milliseconds, sequence + 1)
            target.last_id = f"{key[0]}-{key[1]}"
            target.keys.append(key)
            target.entries.append(Entry(target.last_id, bytes(data)))
            if max_length is not None:
                target.remove_first(len(target.entries) - max_length)
            self._changed.notify_all()
            return target.last_id

    def read(self, stream: str, after: str, *, limit: int, wait_seconds: float = 0.0) -> list[Entry]:
        key = position_key(check_position(after))

        def available() -> list[Entry]:
            found = self._streams.get(stream)
            if found is None:
                return []
            start = bisect_right(found.keys, key)
            return found.entries[start : start + limit]

        with self._changed:
            return self._changed.wait_for(available, timeout=max(wait_seconds, 0.0)) or []

    def ready(self, positions: Mapping[str, str], *, wait_seconds: float = 0.0) -> set[str]:
        keys = {stream: position_key(check_position(after)) for stream, after in positions.items()}

        def available() -> set[str]:
            return {
                stream
                for stream, key in keys.items()
                if stream in self._streams
                and bisect_right(self._streams[stream].keys, key) < len(self._streams[stream].keys)
            }

        with self._changed:
            return self._changed.wait_for(available, timeout=max(wait_seconds, 0.0)) or set()

    def bounds(self, stream: str) -> Bounds | None:
        with self._changed:
            found = self._streams.get(stream)
            if found is None:
                return None
            first = found.entries[0].id if found.entries else None
            return Bounds(len(found.entries), first, found.last_id, found.removed_through)

    def length(self, stream: str) -> int:
        with self._changed:
            return len(self._streams[stream].entries) if stream in self._streams else 0

    def trim(self, stream: str, through: str) -> int:
        key = position_key(check_position(through))
        with self._changed:
            found = self._streams.get(stream)
            return found.remove_first(bisect_right(found.keys, key)) if found else 0

    def epoch(self, stream: str) -> str | None:
        with self._changed:
            return self._epochs.get(stream)

    def claim_epoch(self, stream: str, proposed: str) -> str:
        with self._changed:
            return self._epochs.setdefault(stream, proposed)

    def replace_epoch(self, stream: str, *, old: str, new: str) -> str:
        with self._changed:
            if self._epochs.get(stream, old) == old:
                self._epochs[stream] = new
            return self._epochs[stream]

    def ping(self) -> None:
        """Memory always answers."""

    def close(self) -> None:
        """Nothing to close: others may have opened the same name."""


_shared: dict[str, MemoryLog] = {}


def shared(name: str) -> MemoryLog:
    """This process's log of that name."""
    return _shared.setdefault(name, MemoryLog(name))
