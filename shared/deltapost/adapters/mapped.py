"""Mapped: buffers in files without a name, which the kernel may keep elsewhere than in memory.

Their pages count as this process's memory only while they are looked at: `release` lets go of them, and the
bytes stay in the file or in the system's cache of it. A file without a name is gone with its process.

Failure modes. `allocate` raises OSError when the disk is full: the space is reserved, so that no later write
can fail. A disk that cannot read a page back ends the process (SIGBUS).
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: Bytes written at a time where the system cannot reserve space.
_CHUNK: Final = 1024 * 1024

#: The maps that are alive, by their address.
_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def allocate(directory: str | os.PathLike[str], size: int) -> Bytes:
    """`size` bytes in a file of their own in `directory`, which has no name. Raises OSError."""
    descriptor = _nameless(directory)
    try:
        _reserve(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    array = np.frombuffer(mapped, np.uint8)
    _maps[array.ctypes.data] = mapped
    return array


def behind(addresses: Iterable[int]) -> list[mmap.mmap]:
    """The maps in which any of the addresses lie."""
    maps = dict(_maps.items())
    starts, found = sorted(maps), {}
    for address in addresses:
        index = bisect.bisect_right(starts, address) - 1
        if index >= 0 and address < starts[index] + len(maps[starts[index]]):
            found[starts[index]] = maps[starts[index]]
    return list(found.values())


def address_of(view: memoryview) -> int:
    """Where the bytes of a view that has some begin."""
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address


def release(maps: Iterable[mmap.mmap]) -> None:
    """Lets go of their pages: they are no memory of this process until somebody looks at them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for one in maps:
            with contextlib.suppress(ValueError):  # closed meanwhile
                one.madvise(mmap.MADV_DONTNEED)


def slices(array: np.ndarray[Any, Any], size: int) -> Iterator[np.ndarray[Any, Any]]:
    """A flat array in order, `size` elements at a time; of a mapped one no more than that stays in memory."""
    maps = behind([array.ctypes.data]) if array.size else []
    for begin in range(0, array.size, size):
        yield array[begin : begin + size]
        release(maps)


def _nameless(directory: str | os.PathLike[str]) -> int:
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # not every file system can
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, path = tempfile.mkstemp(prefix="deltapost-", dir=directory)
    os.unlink(path)
    return descriptor


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for begin in range(0, size, _CHUNK):
        os.write(descriptor, bytes(min(_CHUNK, size - begin)))
