"""Buffers: memory that rounds hand on to each other.

A round's outputs are as large as its state, and fresh memory costs a page fault for each page: on large
fragments about as much as the arithmetic. So a buffer whose last view is gone is kept for the next round.

Failure modes. Nothing is kept beyond the limit, nor handed out while somebody can still see it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from deltapost.serialization.payload import Packed, layout
from deltapost.serialization.tensor import DType, TensorBytes, element_bytes

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: Bytes kept for later rounds by the whole process, where nobody says otherwise.
KEPT_BYTES: Final = 512 * 1024 * 1024
#: Smaller buffers are not worth it: malloc keeps them itself.
SMALLEST: Final = 1024 * 1024
#: Where the first tensor of a buffer begins: at a whole cache line.
_ALIGNED: Final = 64


_all: weakref.WeakSet[Buffers] = weakref.WeakSet()


def _after_fork() -> None:
    for one in _all:
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class _View(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view that can be watched: an array of numpy's own has no weak references in all releases."""


def _anonymous(size: int) -> Bytes:
    return np.empty(size, np.uint8)


class Buffers:
    """Buffers of `allocate`, of which those that nobody sees any more are kept: `kept_bytes` at most.

    Safe for all threads. Raises what `allocate` raises.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES, allocate: Callable[[int], Bytes] = _anonymous) -> None:
        self._kept_bytes = kept_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._kept: list[Bytes] = []
        _all.add(self)

    def take(self, size: int) -> Bytes:
        """A buffer of `size` bytes, with anything in it."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        with self._lock:
            fits = [index for index, one in enumerate(self._kept) if size <= one.size <= size + size // 4]
            base = self._kept.pop(fits[-1]) if fits else None
        if base is None:
            base = self._allocate(size)
        view = base.view(_View)
        weakref.finalize(view, self._give_back, base).atexit = False
        return view[:size]

    def kept(self) -> list[int]:
        """The sizes in bytes of the buffers that are kept now."""
        with self._lock:
            return [one.size for one in self._kept]

    def drop(self) -> None:
        """Lets go of what is kept."""
        with self._lock:
            self._kept.clear()

    def _give_back(self, base: Bytes) -> None:
        # It may be called by the collector in a thread that holds the lock: then the buffer is let go.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if sum(one.size for one in self._kept) + base.size <= self._kept_bytes:
                self._kept.append(base)
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        """The lock may have been held by a thread that the child does not have."""
        self._lock = threading.Lock()


#: What a backend uses that was given none.
ANONYMOUS: Final = Buffers()


class Outputs:
    """Tensors that are to be written, in one buffer that already is their payload but for their bytes."""

    def __init__(self, entries: Mapping[str, tuple[DType, tuple[int, ...]]], buffers: Buffers) -> None:
        """`entries` are {name: (dtype, shape)}. Raises InvalidTensor: more than one payload holds."""
        self._entries = entries
        self._layout = layout(entries)
        whole = buffers.take(self._layout.size + _ALIGNED)
        start = -(whole.ctypes.data + len(self._layout.header)) % _ALIGNED
        self._buffer = whole[start : start + self._layout.size]
        self.write(0, self._layout.header)

    def address(self, name: str) -> int:
        """Where the tensor's bytes begin in memory."""
        address: int = self._buffer.ctypes.data + self._layout.offsets[name]
        return address

    def fill(self, name: str, data: bytes) -> None:
        """Writes the tensor's bytes."""
        self.write(self._layout.offsets[name], data)

    def write(self, begin: int, data: bytes) -> None:
        self._buffer[begin : begin + len(data)] = np.frombuffer(data, np.uint8)

    def tensors(self) -> Packed:
        """The tensors as they stand, read-only; the buffer lives for as long as any of them does."""
        whole = memoryview(self._buffer.data).toreadonly()
        found = {}
        for name, (dtype, shape) in self._entries.items():
            begin = self._layout.offsets[name]
            found[name] = TensorBytes(dtype, shape, whole[begin : begin + element_bytes(dtype, shape)])
        return Packed(found, whole)
