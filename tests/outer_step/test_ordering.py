"""Sums of middle values are what sorting one element at a time gives, bit for bit, in every backend."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from deltapost.adapters import ordering
from deltapost.errors import InvalidTensor
from deltapost.serialization import TensorBytes
from outer_step.tensors import BACKENDS, EXACT, ODD_SHAPES, bits, rough

#: Numbers of tensors on both sides of what sorts by exchanges.
COUNTS = (1, 2, 3, 4, 5, 8, 13, ordering.MAX_EXCHANGED, ordering.MAX_EXCHANGED + 1)


def single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]  # type: ignore[no-any-return]


def key(pattern: int) -> int:
    """A float's place in the order, from its bits: sign and magnitude as one number, −0 below +0."""
    return -(pattern & 0x7FFFFFFF) - 1 if pattern >> 31 else pattern


def middle_by_hand(tensors: list[TensorBytes], trim: int) -> bytes:
    """The definition of docs/exactness.md, one element and one Python float at a time."""
    columns = zip(*(struct.unpack(f"<{one.elements}I", one.data) for one in tensors), strict=True)
    sums = []
    for column in columns:
        kept = sorted(column, key=key)[trim : len(column) - trim]
        first, *rest = (struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in kept)
        for value in rest:
            first = single(first + value)
        sums.append(first)
    return struct.pack(f"<{len(sums)}f", *sums)


def middle(backend: str, tensors: list[TensorBytes], trim: int) -> TensorBytes:
    first, *rest = (BACKENDS[backend].load(tensor) for tensor in tensors)
    return first.middle_sum(rest, trim).to_bytes("F32")


def trims(count: int) -> Iterator[int]:
    yield from sorted({0, 1, count // 4, (count - 1) // 2} & set(range((count + 1) // 2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_middle_of_any_number_of_tensors_is_the_definitions(backend: str, count: int) -> None:
    tensors = [rough((67,), seed, 3) for seed in range(count)]

    for trim in trims(count):
        assert middle(backend, tensors, trim).data == middle_by_hand(tensors, trim)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_the_middle_has_the_tensors_shape(backend: str, shape: tuple[int, ...]) -> None:
    tensors = [rough(shape, seed, 3) for seed in range(5)]

    found = middle(backend, tensors, 1)

    assert found.shape == shape
    assert found.data == middle_by_hand(tensors, 1)


@pytest.mark.parametrize("backend", EXACT)
def test_tensors_longer_than_what_is_sorted_at_a_time_have_no_seams(backend: str) -> None:
    tensors = [rough((ordering.chunk_size(5) * 2 + 7,), seed, 3) for seed in range(5)]

    assert middle(backend, tensors, 2) == middle("native", tensors, 2)
    assert middle(backend, tensors, 2).data[-28:] == middle_by_hand(
        [TensorBytes("F32", (7,), one.data[-28:]) for one in tensors], 2
    )


@pytest.mark.parametrize("backend", EXACT)
def test_negative_zero_comes_before_positive_zero_wherever_they_stand(backend: str) -> None:
    minus, plus, two = bits(0x80000000), bits(0), bits(0x40000000)

    for tensors in ([minus, plus, two], [two, plus, minus], [plus, minus, two]):
        assert middle(backend, tensors, 1) == plus
    assert middle(backend, [plus, minus, minus], 1) == minus
    # Both zeros are left: −0 + +0 is +0.
    assert middle(backend, [two, plus, minus, bits(0xC0000000)], 1) == plus


@pytest.mark.parametrize("backend", EXACT)
def test_nans_and_infinities_lie_at_the_ends_and_subnormals_are_numbers(backend: str) -> None:
    hostile = [bits(0x7FC00000), bits(0xFFC00000), bits(0x7F800000), bits(0xFF800000)]
    honest = [bits(0x00000001), bits(0x00000003), bits(0x80000002)]

    assert middle(backend, hostile + honest, 3) == bits(0x00000001)
    assert middle(backend, honest + hostile[:1], 1) == bits(0x00000004)


def test_the_number_of_threads_changes_nothing() -> None:
    tensors = [rough((100_003,), seed, 2) for seed in range(6)]
    expected = middle("native", tensors, 1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert middle("torch", tensors, 1) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "trim"), [(1, 1), (2, 1), (4, 2), (3, -1)])
def test_a_middle_with_nothing_left_is_refused(backend: str, count: int, trim: int) -> None:
    with pytest.raises(InvalidTensor, match="cannot be left out"):
        middle(backend, [bits(0)] * count, trim)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_different_shapes_have_no_middle(backend: str) -> None:
    with pytest.raises(InvalidTensor, match="do not go together"):
        middle(backend, [bits(0, 0), bits(0)], 0)


@pytest.mark.parametrize("count", range(1, 11))
def test_exchanges_sort_every_sequence_of_zeros_and_ones(count: int) -> None:
    # By the 0–1 principle they then sort everything.
    columns = np.array(list(product([0, 1], repeat=count)), np.int32).reshape(-1, count).T.copy()
    for i, j in ordering.exchanges(count):
        columns[[i, j]] = np.sort(columns[[i, j]], axis=0)

    assert (np.diff(columns, axis=0) >= 0).all()


def test_exchanges_sort_as_many_tensors_as_they_are_used_for() -> None:
    generator = np.random.default_rng(5)
    for count in range(11, ordering.MAX_EXCHANGED + 1):
        columns = generator.integers(0, 2, (count, 4000), np.int32)
        for i, j in ordering.exchanges(count):
            columns[[i, j]] = np.sort(columns[[i, j]], axis=0)
        assert (np.diff(columns, axis=0) >= 0).all(), count
