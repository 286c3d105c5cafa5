"""Merges that survive liars: numbers worked out by hand, small rounds, and what two liars of eight can do."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost import codecs
from deltapost.adapters import Value
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Contribution, FragmentState, RoundResult
from deltapost.algorithms.admission import check_payload, delta_norm, judge_norm
from deltapost.algorithms.diloco import DiLoCo, Median, Merge, NormClipped, Rda, TrimmedMean, WeightedMean
from deltapost.algorithms.merges import mean_plan, rda_plan, weighted_mean
from deltapost.algorithms.merges import merged as merge_values
from deltapost.algorithms.robust import clip_scales, median, trimmed_mean
from deltapost.errors import NonFinite
from deltapost.serialization import ParameterSpec, Schema, TensorBytes, pack
from outer_step.tensors import (
    BACKENDS,
    EXACT,
    RULES,
    config,
    contribution,
    f32,
    numbers,
    rough,
    two_element_schema,
    values_of,
)

ROBUST = (NormClipped(), NormClipped(Rda()), TrimmedMean(2), Median())
HONEST = [(1.0 + 0.01 * i, -2.0 + 0.02 * i) for i in range(6)]


def close(
    merge: Merge, given: Sequence[Contribution], *, backend: str = "native", **more: object
) -> RoundResult:
    """A round of one tensor `w` from zero, so that the anchor ends at minus the merged delta."""
    schema = two_element_schema()
    state = FragmentState(0, {"w": f32(0.0, 0.0)}, {"momentum.w": f32(0.0, 0.0)})
    chosen = config(outer_lr=1.0, outer_momentum=0.0, merge=merge, **more)
    return chosen.aggregator(schema, ["w"], BACKENDS[backend]).close_round(state, given)


def merged(merge: Merge, deltas: Sequence[tuple[float, float]], **more: object) -> list[float]:
    given = [contribution(f"l-{i}", {"w": f32(*delta)}) for i, delta in enumerate(deltas)]
    return [-value for value in numbers(close(merge, given, **more).state.theta["w"])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_trimmed_mean_leaves_out_the_ends_of_each_element_by_itself(backend: str) -> None:
    load = BACKENDS[backend].load
    values = [load(f32(*pair)) for pair in ((1, 90), (2, -3), (6, 5), (-50, 4), (70, 3))]

    assert values_of(trimmed_mean(values, 1)) == [3.0, 4.0]
    assert values_of(trimmed_mean(values, 2)) == [2.0, 4.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two(backend: str) -> None:
    load = BACKENDS[backend].load
    values = [load(f32(*pair)) for pair in ((4, 1), (1, 1), (90, 1), (2, 9))]

    assert values_of(median(values)) == [3.0, 1.0]
    assert values_of(median(values[:3])) == [4.0, 1.0]


@pytest.mark.parametrize("rule", [lambda values: trimmed_mean(values, 2), median])
def test_one_value_is_itself_and_two_are_averaged(rule: object) -> None:
    load = NativeBackend().load
    one, other = f32(-0.0, 5.0), f32(3.0, -1.0)

    assert rule([load(one)]).to_bytes("F32") == one  # type: ignore[operator]
    assert values_of(rule([load(one), load(other)])) == [1.5, 2.0]  # type: ignore[operator]


@pytest.mark.parametrize("count", range(1, 9))
def test_a_round_too_small_to_trim_is_merged_by_the_median(count: int) -> None:
    values = [NativeBackend().load(rough((50,), seed, 2)) for seed in range(count)]

    found = trimmed_mean(values, 3).to_bytes("F32"), trimmed_mean(values, 2).to_bytes("F32")

    # Three at each end of seven or eight leave one or two: the median. Two leave more from seven on.
    expected = median(values).to_bytes("F32")
    assert (found[0] == expected, found[1] == expected) == (True, count < 7)


def test_clipping_scales_to_the_lower_median_and_lengthens_nothing() -> None:
    assert clip_scales([2.0, 8.0, 4.0]) == [1.0, 0.5, 1.0]
    assert clip_scales([2.0, 8.0, 4.0, 16.0]) == [1.0, 0.5, 1.0, 0.25]
    assert clip_scales([3.0, 3.0, 3.0]) == [1.0, 1.0, 1.0]
    assert clip_scales([7.0]) == [1.0]
    assert clip_scales([9.0, 3.0]) == [3.0 / 9.0, 1.0]
    assert clip_scales([0.0, 5.0, 0.0]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("backend", EXACT)
def test_norms_are_clipped_over_the_whole_fragment_embeddings_too(backend: str) -> None:
    # Given a long delta whose length lies in `w` alone
    schema = Schema((ParameterSpec("embed", "F32", (1,)), ParameterSpec("w", "F32", (1,))))
    state = FragmentState(
        0,
        {name: f32(0.0) for name in schema.names},
        {f"momentum.{name}": f32(0.0) for name in schema.names},
    )
    pairs = ((4.0, 3.0), (4.0, 3.0), (6.0, 8.0))
    given = [contribution(f"l-{i}", {"embed": f32(e), "w": f32(w)}) for i, (e, w) in enumerate(pairs)]
    chosen = config(outer_lr=1.0, outer_momentum=0.0, merge=NormClipped(Rda()))

    result = chosen.aggregator(schema, schema.names, BACKENDS[backend]).close_round(state, given)

    # Then its 10 becomes the median 5 in both tensors: 3 of `embed`, 4 of `w`; norms are as they were sent.
    assert numbers(result.state.theta["embed"]) == pytest.approx([-(4 + 4 + 3) / 3], rel=1e-6)
    assert numbers(result.state.theta["w"]) == pytest.approx([-(3 + 3 + 4) / 3], rel=1e-6)
    assert [one.norm for one in result.participants] == [5.0, 5.0, 10.0]


@pytest.mark.parametrize("backend", EXACT)
def test_scales_of_one_change_no_bit_of_a_mean(backend: str) -> None:
    values = [BACKENDS[backend].load(rough((333,), seed, 3)) for seed in range(4)]
    weights, ones = [1.0, 2.5, 0.3, 7.0], [1.0] * 4
    norms = [value.norm() for value in values]

    means = merge_values(values, mean_plan(weights)), merge_values(values, mean_plan(weights, ones))
    radial = (
        merge_values(values, rda_plan(weights, norms)),
        merge_values(values, rda_plan(weights, norms, ones)),
    )

    assert means[0].to_bytes("F32") == means[1].to_bytes("F32")
    assert radial[0].to_bytes("F32") == radial[1].to_bytes("F32")


vectors = st.lists(st.floats(-8.0, 8.0, width=32), min_size=3, max_size=3)


@settings(max_examples=60)
@given(st.lists(vectors, min_size=1, max_size=9), st.integers(0, 4), st.randoms())
def test_order_statistics_are_the_same_in_numpy_and_torch_in_any_order(
    given_: list[list[float]], trim: int, chance: object
) -> None:
    shuffled = list(given_)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    found = set()
    for name in EXACT:
        for order in (given_, shuffled):
            values: list[Value] = [BACKENDS[name].load(f32(*vector)) for vector in order]
            found.add(trimmed_mean(values, trim).to_bytes("F32"))

    assert len(found) == 1


@settings(max_examples=60)
@given(
    st.lists(vectors, min_size=3, max_size=6),
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), max_size=2),
)
def test_fewer_than_half_cannot_move_an_element_out_of_the_honest_range(
    honest: list[list[float]], lies: list[list[float]]
) -> None:
    # Whatever floats the liars send, NaNs and infinities among them.
    load = NativeBackend().load
    values = [load(f32(*vector)) for vector in lies + honest]
    results = [trimmed_mean(values, 2)] if len(values) > 4 else []
    if len(lies) < len(honest):
        results.append(median(values))

    for result in results:
        for i, value in enumerate(values_of(result)):
            column = [vector[i] for vector in honest]
            slack = 1e-6 * max(abs(x) for x in column)
            assert min(column) - slack <= value <= max(column) + slack


@pytest.mark.parametrize("lie", [(1e12, -1e12), (-1.0, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("merge", [TrimmedMean(2), Median()])
def test_two_liars_of_eight_stay_without_a_say_in_a_round(merge: Merge, lie: tuple[float, float]) -> None:
    found = merged(merge, [*HONEST, lie, lie])

    assert 1.0 <= found[0] <= 1.05
    assert -2.0 <= found[1] <= -1.9


@pytest.mark.parametrize("base", [WeightedMean(), Rda()])
def test_under_clipping_two_liars_of_eight_pull_no_harder_than_two_honest_ones(
    base: WeightedMean | Rda,
) -> None:
    lie = (-1e12, 2e12)

    clipped, plain = merged(NormClipped(base), [*HONEST, lie, lie]), merged(base, [*HONEST, lie, lie])

    # Of eight equally long deltas two point the other way: half the step is left, in the right direction.
    assert clipped[0] > 0 > clipped[1]
    assert math.hypot(*clipped) <= 2.3
    assert math.hypot(*plain) > 1e11


@pytest.mark.parametrize("merge", [TrimmedMean(2), Median()])
def test_claimed_tokens_give_no_leverage_where_each_contribution_counts_once(merge: Merge) -> None:
    deltas = [*HONEST, (5.0, 5.0)]
    modest = [contribution(f"l-{i}", {"w": f32(*delta)}) for i, delta in enumerate(deltas)]
    boasting = [*modest[:-1], replace(modest[-1], tokens=10**6, steps=1)]

    plain, boasted = close(merge, modest), close(merge, boasting, weight_share_cap=0.01)

    assert plain.state == boasted.state
    assert [one.weight for one in boasted.participants] == [1.0] * 7
    assert boasted.participants[-1].tokens == 10**6


def test_claimed_tokens_weigh_under_clipping_as_they_do_under_its_base() -> None:
    given = [contribution("a", {"w": f32(3.0, 4.0)}, tokens=3), contribution("b", {"w": f32(0.0, 5.0)})]

    assert [one.weight for one in close(NormClipped(), given).participants] == [9.0, 1.0]
    capped = close(NormClipped(), given, weight_share_cap=0.5)
    assert [one.weight for one in capped.participants] == [5.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("merge", ROBUST, ids=str)
@pytest.mark.parametrize("dtype", codecs.NAMES)
def test_every_rule_reads_every_codec_in_every_backend(dtype: str, merge: Merge, backend: str) -> None:
    deltas = [*HONEST[:3], (-50.0, 40.0)]
    codec = codecs.get(dtype)
    given = [
        contribution(f"l-{i}", codec.encode("w", NativeBackend().load(f32(*delta))))
        for i, delta in enumerate(deltas)
    ]

    found = numbers(close(merge, given, backend=backend).state.theta["w"])

    assert -1.6 < found[0] < 0.1
    assert -0.1 < found[1] < 2.6
    if backend in EXACT:
        assert found == numbers(close(merge, given).state.theta["w"])


def test_one_nan_and_one_huge_delta_end_as_verdicts_and_the_rest_closes_by_every_rule() -> None:
    # Given five learners, of whom one sends a NaN and another 1e30 (hivemind PR#379)
    spec, codec = ParameterSpec("w", "F32", (2,)), codecs.get("F32")
    deltas = [*HONEST[:3], (math.nan, 1.0), (1e30, 0.0)]
    admitted, verdicts = [], []
    for delta in deltas:
        try:
            entries = check_payload(pack({"w": f32(*delta)}), [spec], codec)
        except NonFinite:
            verdicts.append("non_finite")
            continue
        verdict = judge_norm(delta_norm(entries, [spec], codec, NativeBackend()), config())
        verdicts.append(verdict or "accepted")
        if verdict is None:
            admitted.append(delta)

    assert verdicts == ["accepted"] * 3 + ["non_finite"] * 2
    for merge in (*RULES, TrimmedMean(2)):
        assert merged(merge, admitted) == pytest.approx([1.01, -1.98], rel=3e-3)


def test_past_admission_trimmed_mean_and_median_stay_finite_and_a_round_refuses_by_every_rule() -> None:
    deltas = [*HONEST[:3], (math.nan, 1.0), (1e30, 0.0)]
    values = [NativeBackend().load(f32(*delta)) for delta in deltas]

    # The values alone: a NaN and 1e30 are ends like any other.
    assert values_of(trimmed_mean(values, 2)) == values_of(median(values)) == pytest.approx([1.02, -1.96])
    assert not weighted_mean(values, [1.0] * 5).is_finite()
    # A round: norms enter its record, so a delta without a finite norm is named, whatever the rule.
    for merge in RULES:
        with pytest.raises(NonFinite, match="'w' from 'l-3'"):
            merged(merge, deltas)


@pytest.mark.parametrize("merge", ROBUST, ids=str)
def test_the_largest_deltas_that_are_admitted_overflow_nothing(merge: Merge) -> None:
    largest = 1.3e19
    assert merged(merge, [(largest, -largest)] * 5) == pytest.approx([largest, -largest], rel=1e-6)
    assert math.isfinite(sum(merged(merge, [*HONEST, (largest, 0.0), (-largest, 0.0)])))


def peak_bytes(merge: Merge, tensors: Sequence[TensorBytes], chosen: DiLoCo) -> int:
    """The most memory that closing a round of these deltas of one tensor takes beyond its inputs."""
    (shape,) = {tensor.shape for tensor in tensors}
    schema = Schema((ParameterSpec("w", "F32", shape),))
    zero = TensorBytes("F32", shape, bytes(4 * tensors[0].elements))
    state = FragmentState(0, {"w": zero}, {"momentum.w": zero})
    aggregator = replace(chosen, merge=merge).aggregator(schema, ["w"], NativeBackend())
    given = [contribution(f"l-{i}", {"w": tensor}) for i, tensor in enumerate(tensors)]
    tracemalloc.start()
    try:
        aggregator.close_round(state, given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("merge", ROBUST, ids=str)
def test_a_robust_merge_needs_no_second_copy_of_the_deltas(merge: Merge) -> None:
    elements = 1 << 19
    tensors = [
        TensorBytes("F32", (elements,), np.full(elements, 0.1 * i + 0.1, "<f4").tobytes()) for i in range(12)
    ]
    plain = peak_bytes(WeightedMean(), tensors, config())

    assert peak_bytes(merge, tensors, config()) <= plain + 4 * elements + (4 << 20)
    assert 4 * elements + (4 << 20) < 12 * 4 * elements / 3
