"""Transfers: objects fetched and written side by side, each hashed once, while it comes in."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, TypeVar

import numpy as np

from deltapost.adapters.buffers import Bytes
from deltapost.serialization.documents import ObjectRef
from deltapost.stores import ObjectStore
from deltapost.stores.reading import pieces, read
from deltapost_aggregator.spool import Spool

T = TypeVar("T")
#: Gives the result of a call, or raises what it raised; waits where it goes on elsewhere.
Result: TypeAlias = Callable[[], T]


@dataclass(frozen=True)
class Fetched:
    """What lay under a key: its size, and the bytes if they are those that were expected, else None."""

    size: int
    data: memoryview | None


class Transfers:
    """Calls side by side in `threads` threads; with one, each in its turn when its result is asked for."""

    def __init__(self, store: ObjectStore, spool: Spool, threads: int) -> None:
        self._store = store
        self._spool = spool
        self._pool = ThreadPoolExecutor(threads, "transfers") if threads > 1 else None

    @property
    def side_by_side(self) -> bool:
        """Whether calls go on before their result is asked for."""
        return self._pool is not None

    def start(self, call: Callable[[], T]) -> Result[T]:
        """Starts the call, if there are threads for it."""
        return cache(call) if self._pool is None else self._pool.submit(call).result

    def each(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        """The results in order. When one raises, those that were started end first."""
        results = [self.start(call) for call in calls]
        try:
            for result in results:
                yield result()
        finally:
            if self._pool is not None:
                for result in results:
                    with contextlib.suppress(Exception):  # the first one is under way already
                        result()

    def fetch(self, key: str, ref: ObjectRef) -> Fetched:
        """The object, hashed as it comes in. Raises what the store raises, and SpoolUnavailable."""
        incoming = _Incoming(self._spool, ref.size)
        info = read(self._store, key, incoming.add, length=ref.size)
        same = info.size == ref.size and incoming.digest.digest() == ref.sha256
        return Fetched(info.size, incoming.view() if same else None)


class _Incoming:
    """The bytes of an object as they arrive. Nothing is taken of the spool before the first of them."""

    def __init__(self, spool: Spool, size: int) -> None:
        self._spool = spool
        self._size = size
        self._buffer: Bytes | None = None
        self._at = 0
        self.digest = hashlib.sha256()

    def add(self, piece: bytes) -> None:
        if self._buffer is None:
            self._buffer = self._spool.take(self._size)
        self._buffer[self._at : self._at + len(piece)] = np.frombuffer(piece, np.uint8)
        self._at += len(piece)
        self.digest.update(piece)

    def view(self) -> memoryview:
        return memoryview(b"") if self._buffer is None else memoryview(self._buffer.data).toreadonly()


def sha256_of(data: bytes | memoryview) -> bytes:
    """The hash of bytes that may be larger than memory."""
    digest = hashlib.sha256()
    for piece in pieces(data):
        digest.update(piece)
    return digest.digest()
