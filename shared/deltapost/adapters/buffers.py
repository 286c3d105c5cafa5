"""Buffers: memory that rounds hand on to each other.

A round's outputs are as large as its state, and fresh memory costs a page fault for each page: on large
fragments about as much as the arithmetic. So a buffer whose last view is gone is kept for the next round.

Failure modes. Nothing is kept beyond KEPT_BYTES, nor handed out while somebody can still see it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

#: Bytes kept for later rounds, by the whole process.
KEPT_BYTES: Final = 512 * 1024 * 1024
#: Smaller buffers are not worth it: malloc keeps them itself.
_SMALLEST: Final = 1024 * 1024
#: Bytes between the tensors of one buffer: whole cache lines, so that no two threads share one.
_ALIGNED: Final = 64


class _View(np.ndarray[Any, np.dtype[np.uint8]]):
    """A view that can be watched: an array of numpy's own has no weak references in all releases."""


class _Kept:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes with anything in it."""
        if size < _SMALLEST:
            return np.empty(size, np.uint8)
        with self._lock:
            fits = [index for index, one in enumerate(self._buffers) if size <= one.size <= size + size // 4]
            base = self._buffers.pop(fits[-1]) if fits else np.empty(size, np.uint8)
        view = base.view(_View)
        weakref.finalize(view, self._give_back, base).atexit = False
        return view

    def _give_back(self, base: Bytes) -> None:
        # It may be called by the collector in a thread that holds the lock: then the buffer is let go.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if sum(one.size for one in self._buffers) + base.size <= KEPT_BYTES:
                self._buffers.append(base)
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        self._lock = threading.Lock()


_kept = _Kept()
os.register_at_fork(after_in_child=_kept.after_fork)


class Outputs:
    """One buffer for a kind of output of all tensors, each tensor at a cache line of its own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        strides = -(-np.array(sizes, np.int64) // _ALIGNED) * _ALIGNED
        self._sizes = list(sizes)
        self._offsets = np.concatenate([[0], np.cumsum(strides)]).astype(np.int64)
        self._buffer = _kept.take(int(self._offsets[-1]) + _ALIGNED)
        self._start = -self._buffer.ctypes.data % _ALIGNED
        self.addresses: Integers = self._buffer.ctypes.data + self._start + self._offsets[:-1]

    def view(self, index: int) -> memoryview:
        """The bytes of one tensor, read-only; the buffer lives for as long as it does."""
        begin = self._start + int(self._offsets[index])
        return memoryview(self._buffer.data)[begin : begin + self._sizes[index]].toreadonly()

    def write(self, index: int, data: bytes) -> None:
        begin = self._start + int(self._offsets[index])
        self._buffer[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
