"""Sums of products have one result: the tree's, whatever the backend, size or thread count."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from deltapost.adapters.torch import TorchBackend
from deltapost.serialization import TensorBytes
from outer_step.tensors import BACKENDS, EXACT, f32, numbers, rough

SIZES = [0, 1, 7, 33, 4095, 4096, 4097, 64 * 4096, 64 * 4096 + 1, 130 * 4096 + 17]


def single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]  # type: ignore[no-any-return]


def tree_by_hand(left: TensorBytes, right: TensorBytes) -> float:
    """The definition of docs/exactness.md, one Python float at a time."""
    products = [single(a * b) for a, b in zip(numbers(left), numbers(right), strict=True)]
    total = 0.0
    for start in range(0, len(products), 4096):
        block = products[start : start + 4096]
        block += [0.0] * (4096 - len(block))
        half = 2048
        while half:
            block = [single(block[i] + block[i + half]) for i in range(half)]
            half //= 2
        total += block[0]
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 1, 7, 33, 4095, 4096, 4097, 3 * 4096 + 5])
def test_a_dot_product_is_the_trees_bit_for_bit(backend: str, size: int) -> None:
    left, right = rough((size,), 1), rough((size,), 2)

    found = BACKENDS[backend].load(left).dot(BACKENDS[backend].load(right))

    assert found == tree_by_hand(left, right)


@pytest.mark.parametrize("size", SIZES)
def test_every_backend_finds_the_same_norm(size: int) -> None:
    data = rough((size,), 3)

    norms = {BACKENDS[name].load(data).norm() for name in BACKENDS}

    assert len(norms) == 1


def test_the_number_of_threads_changes_nothing() -> None:
    data = rough((300_001,), 4)
    threads = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(TorchBackend().load(data).squared_norm())
    finally:
        torch.set_num_threads(threads)

    assert len(found) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_tree_is_as_precise_as_float64_sums_to_a_few_parts_in_ten_million(backend: str) -> None:
    data = rough((200_003,), 5)
    exact = math.sqrt(math.fsum(value * value for value in numbers(data)))

    assert BACKENDS[backend].load(data).norm() == pytest.approx(exact, rel=3e-7)


@pytest.mark.parametrize("backend", EXACT)
def test_squares_past_float32_give_an_infinite_norm_without_a_warning(backend: str) -> None:
    assert BACKENDS[backend].load(f32(1e30, 1.0)).norm() == math.inf


@pytest.mark.parametrize("backend", EXACT)
def test_a_sum_of_negative_zeros_is_positive_zero(backend: str) -> None:
    zeros = BACKENDS[backend].load(f32(-0.0, -0.0))

    assert math.copysign(1.0, zeros.dot(BACKENDS[backend].load(f32(1.0, 1.0)))) == 1.0


def test_block_results_are_added_one_after_the_other() -> None:
    from deltapost.adapters.reduction import add_blocks

    # Pairwise addition keeps the ones; adding in order loses each of them to rounding.
    sums = np.array([2.0**53, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], np.float64).astype(np.float32)

    assert add_blocks(sums) == 2.0**53
