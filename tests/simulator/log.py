"""The streams: a MemoryLog on the simulated clock that can forget, and its faulty front."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar

from deltapost.errors import StreamUnavailable
from deltapost.streams import Bounds, Entry
from deltapost.streams.memory import MemoryLog
from simulator.boundary import Boundary
from simulator.scheduling import Scheduler

T = TypeVar("T")


class ForgetfulLog(MemoryLog):
    """Redis as it is when its disk, its memory or its operator fails."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(milliseconds=self._now)
        self._scheduler = scheduler
        self._set_back = 0

    def _now(self) -> int:
        return max(1, int(self._scheduler.now * 1000) - self._set_back)

    def set_clock_back(self, seconds: int) -> None:
        self._set_back += 1000 * seconds

    def forget(self) -> None:
        """FLUSHALL."""
        self._streams.clear()
        self._epochs.clear()

    def saved(self) -> tuple[object, object]:
        """A copy, as a replica or a dump has it."""
        return copy.deepcopy(self._streams), dict(self._epochs)

    def roll_back(self, saved: tuple[object, object]) -> None:
        """Failover to an older copy: streams and epoch names of then."""
        streams, epochs = saved
        self._streams = copy.deepcopy(streams)  # type: ignore[assignment]
        self._epochs = dict(epochs)  # type: ignore[call-overload]

    def evict(self, stream: str) -> None:
        self._streams.pop(stream, None)

    def lose_epoch(self, stream: str) -> None:
        self._epochs.pop(stream, None)


class FaultyLog:
    """A MessageLog as a process sees it."""

    def __init__(
        self,
        log: ForgetfulLog,
        boundary: Boundary,
        scheduler: Scheduler,
        appended: Callable[[str, bytes], None],
    ) -> None:
        self._log = log
        self._boundary = boundary
        self._scheduler = scheduler
        self._appended = appended

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        def action() -> str:
            entry_id = self._log.append(stream, data, max_length=max_length)
            self._appended(stream, data)
            self._scheduler.wake(stream)
            return entry_id

        return self._call("append", stream, action)

    def read(self, stream: str, after: str, *, limit: int, wait_seconds: float = 0.0) -> list[Entry]:
        def action() -> list[Entry]:
            return self._log.read(stream, after, limit=limit)

        found = self._call("read", stream, action)
        if found or wait_seconds <= 0:
            return found
        self._scheduler.turn("", wait_seconds, listening=frozenset((stream,)))
        return action()

    def ready(self, positions: Mapping[str, str], *, wait_seconds: float = 0.0) -> set[str]:
        def action() -> set[str]:
            return self._log.ready(positions)

        found = self._call("ready", "", action)
        if found or wait_seconds <= 0:
            return found
        self._scheduler.turn("", wait_seconds, listening=frozenset(positions))
        return action()

    def bounds(self, stream: str) -> Bounds | None:
        return self._call("bounds", stream, lambda: self._log.bounds(stream))

    def length(self, stream: str) -> int:
        return self._call("length", stream, lambda: self._log.length(stream))

    def trim(self, stream: str, through: str) -> int:
        return self._call("trim", stream, lambda: self._log.trim(stream, through))

    def epoch(self, stream: str) -> str | None:
        return self._call("epoch", stream, lambda: self._log.epoch(stream))

    def claim_epoch(self, stream: str, proposed: str) -> str:
        return self._call("claim", stream, lambda: self._log.claim_epoch(stream, proposed))

    def replace_epoch(self, stream: str, *, old: str, new: str) -> str:
        return self._call("replace", stream, lambda: self._log.replace_epoch(stream, old=old, new=new))

    def ping(self) -> None:
        self._call("ping", "", self._log.ping)

    def close(self) -> None:
        """Nothing to close."""

    def _call(self, operation: str, stream: str, action: Callable[[], T]) -> T:
        return self._boundary.call("log", operation, stream, action, StreamUnavailable)
