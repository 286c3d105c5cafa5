"""Objects in pieces: read without ever being whole in memory, and bytes given to a store the same way."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from deltapost.adapters.mapped import address_of, behind, release
from deltapost.stores import ObjectInfo, ObjectStore

Sink: TypeAlias = Callable[[bytes], object]

#: Bytes of a piece.
PIECE_BYTES: Final = 1024 * 1024
#: Bytes of a mapped view that are looked at before its pages are let go of.
_HELD_BYTES: Final = 16 * PIECE_BYTES


@runtime_checkable
class PiecesStore(Protocol):
    """What a store also does if it can read an object without having it whole in memory."""

    def read(self, key: str, sink: Sink, *, length: int) -> ObjectInfo:
        """Hands the object's first `length` bytes to `sink` in pieces. Raises as `get`, perhaps half-way."""


def read(store: ObjectStore, key: str, sink: Sink, *, length: int) -> ObjectInfo:
    """Hands the object's first `length` bytes to `sink`, in pieces if the store can. Raises as `get` does.

    What was handed on before an error is to be thrown away. `ObjectInfo.size` is the whole object's.
    """
    # Of its class: something in front of a store, which adds to `get`, is not to be passed by.
    if hasattr(type(store), "read"):
        assert isinstance(store, PiecesStore)
        return store.read(key, sink, length=length)
    blob = store.get(key, length=length)
    sink(blob.data)
    return ObjectInfo(key, blob.size, blob.metadata)


def pieces(data: bytes | memoryview, size: int = PIECE_BYTES) -> Iterator[memoryview]:
    """`data` in order; of a mapped view only the last few pieces stay in memory."""
    view = memoryview(data)
    maps = _maps(view)
    for begin in range(0, len(view), size):
        yield view[begin : begin + size]
        if maps and (begin + size) % _HELD_BYTES < size:
            release(maps)
    release(maps)


class Body(io.RawIOBase):
    """A view as a file to read from, for what takes bytes or files only."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._maps = _maps(data)
        self._since_release = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        piece = self._data[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        self._since_release += len(piece)
        if self._maps and (self._since_release >= _HELD_BYTES or not piece):
            release(self._maps)
            self._since_release = 0
        return len(piece)


def _maps(view: memoryview) -> list[Any]:
    return behind([address_of(view)]) if len(view) else []
