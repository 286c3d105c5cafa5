"""A round closes to the same bytes whatever reaches it first, and refuses what is not the fragment's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from deltapost import codecs
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Aggregator, FragmentState, RoundResult
from deltapost.algorithms.diloco import DiLoCo, Merge, Rda, WeightedMean
from deltapost.errors import ConfigurationError, NonFinite, SchemaMismatch
from deltapost.serialization import ParameterSpec, Schema, TensorBytes, pack, unpack
from outer_step.tensors import (
    BACKENDS,
    EXACT,
    LEARNERS,
    RULES,
    SCHEMA,
    config,
    contribution,
    delta,
    f32,
    first_state,
    numbers,
    round_of,
    shuffled,
    two_element_schema,
)

STATE = FragmentState(7, {"w": f32(1.0, 1.0)}, {"momentum.w": f32(0.0, 0.0)})
PLAIN = config(outer_lr=1.0, outer_momentum=0.0, merge=WeightedMean())


def close(settings: DiLoCo, state: FragmentState, given: list, backend: str = "native") -> RoundResult:
    schema = two_element_schema()
    return settings.aggregator(schema, ["w"], BACKENDS[backend]).close_round(state, given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_positive_delta_moves_the_anchor_down_to_where_the_learner_went(backend: str) -> None:
    # Given a learner that moved from 1.0 to 0.9, so a delta of 0.1
    given = [contribution("a", {"w": f32(0.1, 0.1)})]

    result = close(PLAIN, STATE, given, backend)

    assert numbers(result.state.theta["w"]) == pytest.approx([0.9, 0.9], rel=1e-6)
    assert result.state.version == 8


def test_any_order_of_arrival_closes_to_one_result() -> None:
    settings = config(delta_dtype="F4", commit_dtype="F8_E4M3")
    given, state = round_of("F4"), first_state()
    aggregator = settings.aggregator(SCHEMA, SCHEMA.names, NativeBackend())
    expected = aggregator.close_round(state, given)

    for seed in range(5):
        assert aggregator.close_round(state, shuffled(seed, given)) == expected
    assert [one.learner for one in expected.participants] == sorted(LEARNERS)


@pytest.mark.parametrize("merge", RULES, ids=str)
@pytest.mark.parametrize("commit", [None, "F32", "BF16", "F4"])
def test_native_and_torch_close_three_rounds_to_equal_bytes_and_observations(
    merge: Merge, commit: str | None
) -> None:
    settings = config(merge=merge, commit_dtype=commit)
    results = []
    for name in EXACT:
        aggregator = settings.aggregator(SCHEMA, SCHEMA.names, BACKENDS[name])
        state, seen = first_state(), []
        for dtype in ("F4", "BF16", "F8_E4M3"):
            result = aggregator.close_round(state, round_of(dtype))
            state = result.state
            seen.append((result, [(one.norm, one.cosine) for one in result.participants]))
        results.append(seen)

    assert results[0] == results[1]


def test_contributions_of_different_precision_merge_in_one_round() -> None:
    schema = two_element_schema()
    f4 = codecs.get("F4").encode("w", NativeBackend().load(f32(2.0, -4.0)))
    bf16 = codecs.get("BF16").encode("w", NativeBackend().load(f32(4.0, 2.0)))

    result = close(PLAIN, STATE, [contribution("a", f4), contribution("b", bf16)])

    assert numbers(result.state.theta["w"]) == [1.0 - 3.0, 1.0 + 1.0]
    assert schema.names == ("w",)


class ReadOnDemand(Mapping[str, TensorBytes]):
    """Entries that are unpacked anew at each access, as from a file that is larger than memory."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def __getitem__(self, name: str) -> TensorBytes:
        return unpack(self.payload)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(unpack(self.payload))

    def __len__(self) -> int:
        return len(unpack(self.payload))


def test_contributions_may_be_read_on_demand() -> None:
    given = round_of("F4")
    lazy = [replace(one, tensors=ReadOnDemand(pack(one.tensors))) for one in given]
    aggregator = config().aggregator(SCHEMA, SCHEMA.names, NativeBackend())

    assert aggregator.close_round(first_state(), lazy) == aggregator.close_round(first_state(), given)


def test_results_hold_no_view_of_their_inputs() -> None:
    state, buffers = first_state(), list[bytearray]()

    def viewed(tensors: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
        buffers.append(bytearray(pack(tensors)))
        return unpack(memoryview(buffers[-1]).toreadonly())

    given = [replace(one, tensors=viewed(one.tensors), final=True) for one in round_of("F8_E4M3")]
    aggregator = config(commit_dtype="F4").aggregator(SCHEMA, SCHEMA.names, NativeBackend())
    result = aggregator.close_round(FragmentState(0, viewed(state.theta), viewed(state.outer)), given)
    every = {
        **result.state.theta,
        **{f"o.{k}": v for k, v in result.state.outer.items()},
        **(result.update or {}),
    }
    before = {name: bytes(tensor.data) for name, tensor in every.items()}

    for buffer in buffers:
        buffer[:] = b"\xff" * len(buffer)

    assert {name: bytes(tensor.data) for name, tensor in every.items()} == before


def test_what_a_narrow_commit_loses_stays_in_the_master_and_goes_out_later() -> None:
    settings = config(outer_lr=1.0, outer_momentum=0.0, merge=WeightedMean(), commit_dtype="F4")
    state = FragmentState(0, {"w": f32(0.0, 0.0)}, {"momentum.w": f32(0.0, 0.0)})

    # Given a move to (6, 4.75), of which the E2M1 grid at scale 1 can say (6, 4)
    first = close(settings, state, [contribution("a", {"w": f32(-6.0, -4.75)})])
    # When nobody moves in the next round
    second = close(settings, first.state, [contribution("a", {"w": f32(0.0, 0.0)})])

    assert numbers(first.state.theta["w"]) == [6.0, 4.0]
    assert numbers(first.state.outer["master.w"]) == [6.0, 4.75]
    # Then the rest is published: 0.75 is on the grid of its own scale.
    assert numbers(second.state.theta["w"]) == [6.0, 4.75]


def test_whoever_has_the_old_anchor_and_the_update_has_the_new_anchor() -> None:
    native, state = NativeBackend(), first_state()
    settings = config(delta_dtype="BF16", commit_dtype="F8_E4M3")
    result = settings.aggregator(SCHEMA, SCHEMA.names, native).close_round(state, round_of("BF16"))
    assert result.update is not None

    for spec in SCHEMA:
        moved = native.load(state.theta[spec.name]) + codecs.get("F8_E4M3").decode(
            spec, result.update, native
        )
        assert moved.to_bytes(spec.dtype) == result.state.theta[spec.name]


def test_masters_are_kept_exactly_where_the_anchor_does_not_hold_them() -> None:
    native, state, given = NativeBackend(), first_state(), round_of("F32")

    without = config().aggregator(SCHEMA, SCHEMA.names, native).close_round(state, given)
    with_commit = (
        config(commit_dtype="F32").aggregator(SCHEMA, SCHEMA.names, native).close_round(state, given)
    )

    masters = {name for name in without.state.outer if name.startswith("master.")}
    assert masters == {"master.block.weight", "master.norm.weight"}
    assert {name for name in with_commit.state.outer if name.startswith("master.")} == {
        f"master.{name}" for name in SCHEMA.names
    }
    assert without.update is None


def test_a_round_of_final_contributions_moves_by_the_delta_and_keeps_the_momentum() -> None:
    state = FragmentState(2, {"w": f32(1.0, 2.0)}, {"momentum.w": f32(5.0, -3.0)})
    given = [contribution(learner, {"w": f32(0.5, 0.25)}, final=True) for learner in "ab"]

    finals = close(config(merge=WeightedMean()), state, given)
    mixed = close(config(merge=WeightedMean()), state, [given[0], replace(given[1], final=False)])

    assert numbers(finals.state.theta["w"]) == [0.5, 1.75]
    assert finals.state.outer == {"momentum.w": f32(5.0, -3.0)}
    assert mixed.state.outer != finals.state.outer


def test_embeddings_take_the_weighted_mean_whatever_the_case_of_their_name() -> None:
    schema = two_element_schema(names=("EMBED", "other"))
    state = FragmentState(
        0,
        {name: f32(0.0, 0.0) for name in schema.names},
        {f"momentum.{name}": f32(0.0, 0.0) for name in schema.names},
    )
    given = [
        contribution("a", {name: f32(-2.0, 0.0) for name in schema.names}),
        contribution("b", {name: f32(0.0, -2.0) for name in schema.names}),
    ]
    settings = config(outer_lr=1.0, outer_momentum=0.0, merge=Rda())

    theta = settings.aggregator(schema, schema.names, NativeBackend()).close_round(state, given).state.theta

    assert numbers(theta["EMBED"]) == [1.0, 1.0]
    assert numbers(theta["other"]) == pytest.approx([math.sqrt(2)] * 2, rel=1e-6)


def test_weights_follow_tokens_and_steps_and_the_share_cap() -> None:
    given = [
        contribution("a", {"w": f32(1.0, 0.0)}, tokens=6, steps=2),
        contribution("b", {"w": f32(0.0, 1.0)}, tokens=2, steps=2),
    ]

    free = close(PLAIN, STATE, given)
    capped = close(replace(PLAIN, weight_share_cap=0.5), STATE, given)

    assert [one.weight for one in free.participants] == [18.0, 2.0]
    assert numbers(free.state.theta["w"]) == pytest.approx([0.1, 0.9], rel=1e-6)
    assert [one.weight for one in capped.participants] == [10.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_participants_get_their_deltas_norm_and_cosine_with_the_merged_delta(backend: str) -> None:
    given = [
        contribution("a", {"w": f32(3.0, 4.0)}),
        contribution("b", {"w": f32(0.0, 0.0)}),
        contribution("c", {"w": f32(3.0, -4.0)}),
    ]

    result = close(PLAIN, STATE, given, backend)

    # The merged delta is (2, 0).
    assert [one.norm for one in result.participants] == [5.0, 0.0, 5.0]
    assert [one.cosine for one in result.participants] == pytest.approx([0.6, 0.0, 0.6], rel=1e-6)
    # Of three pairs only (a, c) has two directions: (9 - 16) / 25 over 3.
    assert result.cosine == pytest.approx(-0.28 / 3, rel=1e-6)


def test_norms_and_cosines_span_all_tensors_of_the_fragment() -> None:
    result = (
        config().aggregator(SCHEMA, SCHEMA.names, NativeBackend()).close_round(first_state(), round_of("F32"))
    )
    vectors = []
    for one in sorted(round_of("F32"), key=lambda one: one.learner):
        vectors.append([x for spec in SCHEMA for x in numbers(one.tensors[spec.name])])

    def cosine(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    pairs = [cosine(a, b) for i, a in enumerate(vectors) for b in vectors[:i]]
    assert [one.norm for one in result.participants] == pytest.approx(
        [math.hypot(*vector) for vector in vectors], rel=1e-6
    )
    assert result.cosine == pytest.approx(math.fsum(pairs) / len(pairs), abs=1e-6)


def test_cosines_never_leave_minus_one_to_one() -> None:
    tensors = delta("F32", 3)
    given = [contribution(learner, tensors) for learner in LEARNERS]

    result = config().aggregator(SCHEMA, SCHEMA.names, NativeBackend()).close_round(first_state(), given)

    assert result.cosine is not None
    assert 1.0 - 1e-6 < result.cosine <= 1.0
    assert all(1.0 - 1e-6 < one.cosine <= 1.0 for one in result.participants)


def test_observations_do_not_make_participants_differ() -> None:
    one = close(PLAIN, STATE, [contribution("a", {"w": f32(1.0, 2.0)})]).participants[0]

    assert replace(one, norm=9.0, cosine=-1.0) == one
    assert one.norm == math.sqrt(5.0)


def test_one_contribution_has_no_mean_cosine_and_zero_deltas_have_zero() -> None:
    zero = {"w": f32(0.0, 0.0)}

    assert close(PLAIN, STATE, [contribution("a", {"w": f32(1.0, 2.0)})]).cosine is None
    both = close(PLAIN, STATE, [contribution("a", zero), contribution("b", zero)])
    assert both.cosine == 0.0
    assert both.state.theta == STATE.theta


@pytest.mark.parametrize("merge", RULES, ids=str)
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_delta_without_a_finite_norm_closes_no_round_and_is_named(
    merge: Merge, backend: str, bad: float
) -> None:
    given = [contribution("a", {"w": f32(1.0, 1.0)}), contribution("evil", {"w": f32(bad, 0.0)})]

    with pytest.raises(NonFinite, match=r"'w' from 'evil'"):
        close(config(merge=merge), STATE, given, backend)


@pytest.mark.parametrize("backend", EXACT)
def test_a_result_past_the_anchors_dtype_closes_no_round(backend: str) -> None:
    schema = two_element_schema("F16")
    state = FragmentState(0, {"w": TensorBytes("F16", (2,), b"\xff\x7b\0\0")}, {"momentum.w": f32(0.0, 0.0)})
    aggregator = PLAIN.aggregator(schema, ["w"], BACKENDS[backend])

    with pytest.raises(NonFinite, match="anchor of 'w'"):
        aggregator.close_round(state, [contribution("a", {"w": f32(-1000.0, 0.0)})])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], ConfigurationError, "not with none"),
        ([contribution("a", {"w": f32(1, 1)})] * 2, ConfigurationError, "'a' has two contributions"),
        ([contribution("a", {"w": f32(1, 1)}, tokens=0)], ConfigurationError, "no weight"),
        ([contribution("a", {"w": f32(1, 1)}, steps=0)], ConfigurationError, "no weight"),
        ([contribution("a", {"v": f32(1, 1)})], SchemaMismatch, "of 'a' lacks the entry 'w'"),
        ([contribution("a", {"w": f32(1, 1), "v": f32(1)})], SchemaMismatch, "'v'"),
        ([contribution("a", {"w": TensorBytes("F8_E4M3", (2,), b"ab")})], SchemaMismatch, "'w.scale'"),
        (
            [contribution("a", {"w": f32(1, 1, shape=(2, 1))})],
            SchemaMismatch,
            r"of 'a' is F32 of shape \(2, 1\)",
        ),
        ([contribution("a", {"w": TensorBytes("I32", (2,), bytes(8))})], SchemaMismatch, "as I32"),
    ],
)
def test_contributions_that_cannot_be_merged_are_refused_by_name(
    given: list, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        close(PLAIN, STATE, given)


@pytest.mark.parametrize(
    ("theta", "outer", "words"),
    [
        ({}, STATE.outer, "anchor lacks the entry 'w'"),
        ({"w": f32(1.0)}, STATE.outer, r"'w' in the anchor is F32 of shape \(1,\)"),
        (STATE.theta, {}, "outer state lacks the entry 'momentum.w'"),
        (STATE.theta, {**STATE.outer, "master.w": f32(1.0, 1.0)}, "'master.w'"),
        (STATE.theta, {**STATE.outer, "momentum.v": f32(1.0, 1.0)}, "'momentum.v'"),
    ],
)
def test_a_state_that_is_not_the_fragments_is_refused_by_name(theta: dict, outer: dict, words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        close(PLAIN, FragmentState(0, theta, outer), [contribution("a", {"w": f32(1.0, 1.0)})])


def test_an_aggregator_is_a_value_made_of_its_settings() -> None:
    schema = Schema((ParameterSpec("a", "F32", ()), ParameterSpec("b", "F32", ())))
    one = PLAIN.aggregator(schema, ["b", "a"], NativeBackend())

    assert isinstance(one, Aggregator)
    assert one == PLAIN.aggregator(schema, ["a", "b"], NativeBackend())
    assert one != PLAIN.aggregator(schema, ["a"], NativeBackend())
    with pytest.raises(ConfigurationError, match="each once"):
        PLAIN.aggregator(schema, ["a", "a"], NativeBackend())
    with pytest.raises(SchemaMismatch, match="'c'"):
        PLAIN.aggregator(schema, ["c"], NativeBackend())
