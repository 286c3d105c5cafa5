"""Memory that rounds hand on to each other is nobody else's while somebody sees it."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from deltapost.adapters import mapped
from deltapost.adapters.buffers import SMALLEST, Buffers, Outputs
from deltapost.serialization import TensorBytes, pack, packed, unpack
from deltapost.serialization.payload import Packed

LARGE = {"big": ("F32", (SMALLEST,)), "small": ("BF16", (32,))}


def outputs(buffers: Buffers) -> Outputs:
    return Outputs(LARGE, buffers)  # type: ignore[arg-type]


def test_a_buffer_is_handed_on_once_its_last_view_is_gone() -> None:
    # Given a round's output of which one tensor's bytes are still held
    buffers = Buffers()
    first = outputs(buffers)
    where = first.address("big")
    first.fill("small", b"anchor")
    held = first.tensors()["small"]
    del first

    # When the next round needs as much
    second = outputs(buffers)

    # Then it gets other memory, and what is held keeps its bytes
    second.fill("small", b"others")
    assert second.address("big") != where
    assert bytes(held.data[:6]) == b"anchor"

    # And once nobody holds it any more, the round after that gets it
    del held
    third = outputs(buffers)
    assert third.address("big") == where
    assert second.address("big") != where


def test_no_more_is_kept_than_the_limit() -> None:
    buffers = Buffers(kept_bytes=9 * SMALLEST)
    rounds = [outputs(buffers) for _ in range(3)]

    rounds.clear()

    assert [size >= 4 * SMALLEST for size in buffers.kept()] == [True, True]
    buffers.drop()
    assert buffers.kept() == []


def test_a_tensor_s_bytes_cannot_be_written_through_their_view() -> None:
    view = outputs(Buffers()).tensors()["big"].data

    assert isinstance(view, memoryview)
    assert view.readonly
    assert len(view) == 4 * SMALLEST


def test_outputs_are_their_payload_once_their_bytes_are_written() -> None:
    tensors = {
        "w": TensorBytes("F32", (3,), b"twelve bytes"),
        "a": TensorBytes("BF16", (1,), b"ab"),
        "odd": TensorBytes("U8", (5,), b"other"),
    }
    made = Outputs({name: (one.dtype, one.shape) for name, one in tensors.items()}, Buffers())
    for name, one in tensors.items():
        made.fill(name, bytes(one.data))

    found = made.tensors()

    assert isinstance(found, Packed)
    assert dict(found) == tensors
    assert packed(found) == pack(found) == pack(tensors) == packed(tensors)
    assert unpack(packed(found)) == tensors


def test_what_lies_in_a_file_leaves_memory_and_keeps_its_bytes(tmp_path: Path) -> None:
    # Given a buffer in a file without a name
    buffers = Buffers(allocate=lambda size: mapped.allocate(tmp_path, size))
    array = buffers.take(8 * SMALLEST)
    array[:] = 7
    maps = mapped.behind([array.ctypes.data, array.ctypes.data + 5])
    assert len(maps) == 1
    assert isinstance(maps[0], mmap.mmap)
    assert list(tmp_path.iterdir()) == []
    before = _resident(array)

    # When its pages are let go of
    mapped.release(maps)

    # Then they are no memory of this process, and what they held is there
    assert before == array.nbytes // 1024
    assert _resident(array) == 0
    assert np.all(array == 7)


def test_addresses_outside_every_map_are_behind_none(tmp_path: Path) -> None:
    kept = mapped.allocate(tmp_path, SMALLEST)
    begin = kept.ctypes.data

    assert mapped.behind([begin - 1, begin + SMALLEST, np.empty(4).ctypes.data, 0]) == []
    del kept
    gc.collect()
    assert mapped.behind([begin]) == []


def test_a_file_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"File too large|No space left"):
        mapped.allocate(tmp_path, 2**62)


def _resident(array: np.ndarray) -> int:  # type: ignore[type-arg]
    """KiB of the array's map that are in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inside, found = False, 0
    for line in lines:
        span = line.split(" ", 1)[0]
        if "-" in span and not span.endswith(":"):
            low, high = (int(part, 16) for part in span.split("-"))
            inside = low <= array.ctypes.data < high
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found
