"""Merges and the outer step against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost.algorithms.diloco import nesterov, rda, weighted_mean
from deltapost.algorithms.merges import capped_weights, normalized, weight
from deltapost.errors import ConfigurationError
from outer_step.tensors import BACKENDS, EXACT, f32, rough, values_of


def test_weights_are_squared_in_whole_numbers_and_divided_once() -> None:
    assert weight(3, 2) == 4.5
    # 94906267² is above 2⁵³: floats would round it before the division.
    assert weight(94906267, 3) == 94906267**2 / 3
    assert weight(2**53, 1) == 2.0**106


def test_a_share_cap_is_taken_once_of_the_uncapped_sum() -> None:
    assert capped_weights([6.0, 1.0, 1.0], 0.5) == [4.0, 1.0, 1.0]
    assert capped_weights([6.0, 1.0, 1.0], None) == [6.0, 1.0, 1.0]


def test_shares_use_the_exact_sum() -> None:
    assert normalized([1e16, 1.0, 1.0])[0] == 1e16 / (1e16 + 2)


@pytest.mark.parametrize("weights", [[0.0, 0.0], []])
def test_weights_without_a_positive_sum_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="total weight"):
        normalized(weights)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_weighted_mean_is_each_value_by_its_share(backend: str) -> None:
    load = BACKENDS[backend].load

    mean = weighted_mean([load(f32(4.0, 0.0, 2.0)), load(f32(0.0, 8.0, 2.0))], [1.0, 3.0])

    assert values_of(mean) == [1.0, 6.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rda_keeps_the_mean_norm_along_the_mean_direction(backend: str) -> None:
    load = BACKENDS[backend].load

    # ‖v‖ are 2 and 6, the directions x and y: mean norm 4 along (1, 1)/√2.
    merged = rda([load(f32(2.0, 0.0)), load(f32(0.0, 6.0))], [1.0, 1.0])

    assert values_of(merged) == pytest.approx([4 / math.sqrt(2)] * 2, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rda_of_directions_that_cancel_to_rounding_noise_is_zero(backend: str) -> None:
    load = BACKENDS[backend].load
    value = load(rough((50,), 1, 2))

    merged = rda([value, value * -3.0, value], [1.0, 2.0, 1.0])

    assert values_of(merged) == [0.0] * 50


@pytest.mark.parametrize("backend", BACKENDS)
def test_rda_of_zero_vectors_is_zero_and_a_zero_vector_only_shortens(backend: str) -> None:
    load = BACKENDS[backend].load
    zero = load(f32(0.0, 0.0))

    assert values_of(rda([zero, zero], [1.0, 2.0])) == [0.0, 0.0]
    assert values_of(rda([zero, load(f32(3.0, 4.0))], [1.0, 1.0])) == pytest.approx([1.5, 2.0], rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rda_does_not_blow_up_a_vector_shorter_than_its_smallest_norm(backend: str) -> None:
    # φ(x) = x / 1e-12 is 1e-3 long, so ψ still normalizes it, and the mean norm is the vector's own.
    tiny = BACKENDS[backend].load(f32(1e-15, 0.0))

    assert values_of(rda([tiny], [1.0])) == pytest.approx([1e-15, 0.0], rel=1e-6)


vectors = st.lists(st.floats(-8.0, 8.0, width=32), min_size=5, max_size=5)


@settings(max_examples=40)
@given(st.lists(st.tuples(vectors, st.floats(0.01, 100.0)), min_size=1, max_size=5))
def test_merges_give_the_same_bytes_in_numpy_and_torch(given_: list[tuple[list[float], float]]) -> None:
    results = []
    for name in EXACT:
        values = [BACKENDS[name].load(f32(*vector)) for vector, _ in given_]
        weights = [value for _, value in given_]
        results.append([rule(values, weights).to_bytes("F32") for rule in (weighted_mean, rda)])

    assert results[0] == results[1]


@settings(max_examples=40)
@given(st.lists(st.tuples(vectors, st.floats(0.01, 100.0)), min_size=1, max_size=5))
def test_a_merge_is_never_longer_than_the_mean_norm(given_: list[tuple[list[float], float]]) -> None:
    values = [BACKENDS["native"].load(f32(*vector)) for vector, _ in given_]
    weights = [value for _, value in given_]
    shares = normalized(weights)
    longest = sum(share * value.norm() for share, value in zip(shares, values, strict=True))

    assert weighted_mean(values, weights).norm() <= longest * (1 + 1e-5) + 1e-30
    assert rda(values, weights).norm() <= longest * (1 + 1e-5) + 1e-30


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_nesterov_rounds_follow_the_hand_computed_path(backend: str) -> None:
    load = BACKENDS[backend].load
    theta, momentum = load(f32(1.0)), load(f32(0.0))
    path = []
    for delta in (0.1, 0.2, -0.4):
        theta, momentum = nesterov(theta, momentum, load(f32(delta)), lr=0.7, beta=0.9)
        path.append((values_of(theta)[0], values_of(momentum)[0]))

    # m = 0.1, 0.29, -0.139; Θ = 1 - 0.7·0.19, then - 0.7·0.461, then - 0.7·(-0.5251).
    expected = [(0.867, 0.1), (0.5443, 0.29), (0.91187, -0.139)]
    assert path == [pytest.approx(pair, rel=1e-5) for pair in expected]


@pytest.mark.parametrize("backend", EXACT)
def test_the_nesterov_step_rounds_after_each_operation(backend: str) -> None:
    import numpy as np

    load = BACKENDS[backend].load
    theta, momentum, delta = (rough((1000,), seed, 2) for seed in (1, 2, 3))
    t, m, d = (np.frombuffer(x.data, np.float32) for x in (theta, momentum, delta))
    lr, beta = np.float32(0.7), np.float32(0.9)
    next_m = beta * m + d
    next_t = t - lr * (d + beta * next_m)

    found = nesterov(load(theta), load(momentum), load(delta), lr=0.7, beta=0.9)

    assert [value.to_bytes("F32").data for value in found] == [next_t.tobytes(), next_m.tobytes()]
