"""Kept payloads: one bound for the process, however many fragments it serves. A miss only costs a read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeAlias

from deltapost.serialization.tensor import Buffer

_Key: TypeAlias = tuple[str, int, bytes]


class PayloadMemory:
    """At most `capacity` bytes of payloads of all fragments; the oldest go first. Safe for all threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._held = 0
        self._payloads: OrderedDict[_Key, Buffer] = OrderedDict()

    @property
    def held(self) -> int:
        """Bytes kept now."""
        return self._held

    def part(self, run: str, fragment: int) -> PayloadCache:
        """One fragment's view of it."""
        return PayloadCache(self, run, fragment)

    def put(self, key: _Key, data: Buffer) -> None:
        """Keeps the bytes if they fit at all."""
        with self._lock:
            if key in self._payloads or len(data) > self._capacity:
                return
            self._payloads[key] = data
            self._held += len(data)
            while self._held > self._capacity:
                _, oldest = self._payloads.popitem(last=False)
                self._held -= len(oldest)

    def get(self, key: _Key) -> Buffer | None:
        with self._lock:
            return self._payloads.get(key)

    def forget(self, key: _Key) -> None:
        with self._lock:
            found = self._payloads.pop(key, None)
            self._held -= 0 if found is None else len(found)


class PayloadCache:
    """One fragment's payloads, by SHA-256. Used by one thread at a time."""

    def __init__(self, memory: PayloadMemory, run: str, fragment: int) -> None:
        self._memory = memory
        self._run = run
        self._fragment = fragment
        self._kept: set[bytes] = set()

    def put(self, sha256: bytes, data: Buffer) -> None:
        """Keeps the bytes if they fit at all."""
        self._kept.add(sha256)
        self._memory.put((self._run, self._fragment, sha256), data)

    def get(self, sha256: bytes) -> Buffer | None:
        return self._memory.get((self._run, self._fragment, sha256))

    def clear(self) -> None:
        """Forgets the fragment's payloads: their round is committed, or the fragment is another's."""
        for sha256 in self._kept:
            self._memory.forget((self._run, self._fragment, sha256))
        self._kept.clear()
