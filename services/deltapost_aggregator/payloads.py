"""PayloadCache: payload bytes kept in memory between their admission and the close of their round."""

from __future__ import annotations

from collections import OrderedDict


class PayloadCache:
    """At most `capacity` bytes by SHA-256; the oldest go first. Used by one worker thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._payloads: OrderedDict[bytes, bytes] = OrderedDict()

    def put(self, sha256: bytes, data: bytes) -> None:
        """Keeps the bytes if they fit at all."""
        if sha256 in self._payloads or len(data) > self._capacity:
            return
        self._payloads[sha256] = data
        self._held += len(data)
        while self._held > self._capacity:
            _, oldest = self._payloads.popitem(last=False)
            self._held -= len(oldest)

    def get(self, sha256: bytes) -> bytes | None:
        return self._payloads.get(sha256)

    def clear(self) -> None:
        """Forgets everything: its round is committed."""
        self._payloads.clear()
        self._held = 0
