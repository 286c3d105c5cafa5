"""Order statistics: for each element, the middle values of N tensors, with the same bits everywhere.

Floats are ordered by their bits: as numbers, −0 before +0, a negative NaN before everything, a positive one
after. That order is total, so the sorted values are the same whatever sorts them; what is added, and in which
order, is then fixed (`docs/exactness.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np

from deltapost.adapters.floats import Floats
from deltapost.errors import InvalidTensor

Keys: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

#: Elements whose keys are held at a time, over all tensors: 1 MiB stays in a core's cache.
KEYS_AT_ONCE: Final = 1 << 18
#: The most tensors that are sorted by exchanges: up to here whole rows at a time beat sorting each column.
MAX_EXCHANGED: Final = 32
#: Turns the bits of a negative float, read as an integer, into a key that grows with the float.
MAGNITUDE: Final = 0x7FFFFFFF


@cache
def exchanges(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs (i, j) whose exchange into order, one after the other, sorts `count` values.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M).

    >>> exchanges(3)
    ((0, 2), (0, 1), (1, 2))
    """
    return tuple(_merge_exchange(count))


def _merge_exchange(count: int) -> Iterator[tuple[int, int]]:
    largest = 1 << (count - 1).bit_length() >> 1
    width = largest
    while width:
        reach, bit, distance = largest, 0, width
        while True:
            yield from ((i, i + distance) for i in range(count - distance) if i & width == bit)
            if reach == width:
                break
            distance, reach, bit = reach - width, reach >> 1, width
        width >>= 1


def check_middle(count: int, trim: int) -> None:
    """Raises InvalidTensor unless some of `count` values are left without `trim` at each end."""
    if trim < 0 or count - 2 * trim < 1:
        raise InvalidTensor(f"of {count} values, {trim} at each end cannot be left out")


def chunk_size(count: int) -> int:
    """Elements of each of `count` tensors that are sorted at a time."""
    return max(1, KEYS_AT_ONCE // count)


def middle_sum(arrays: Sequence[Floats], trim: int) -> Floats:
    """For each element, the values without the `trim` lowest and highest, added in ascending order.

    `arrays` are contiguous float32 of one shape. Needs memory for the result and KEYS_AT_ONCE keys.
    """
    check_middle(len(arrays), trim)
    flat = [array.reshape(-1).view(np.int32) for array in arrays]
    total = np.empty(flat[0].size, np.float32)
    step = chunk_size(len(flat))
    for start in range(0, total.size, step):
        keys = np.stack([bits[start : start + step] for bits in flat])
        keys ^= (keys >> 31) & MAGNITUDE
        _sort(keys)
        keys ^= (keys >> 31) & MAGNITUDE
        middle = keys.view(np.float32)[trim : len(flat) - trim]
        chunk = total[start : start + step]
        chunk[:] = middle[0]
        with np.errstate(all="ignore"):
            for row in middle[1:]:
                chunk += row
    return total.reshape(arrays[0].shape)


def _sort(keys: Keys) -> None:
    """Sorts each column in place."""
    if len(keys) > MAX_EXCHANGED:
        keys.sort(axis=0)
        return
    lower = np.empty(keys.shape[1], np.int32)
    for i, j in exchanges(len(keys)):
        np.minimum(keys[i], keys[j], out=lower)
        np.maximum(keys[i], keys[j], out=keys[j])
        keys[i] = lower
