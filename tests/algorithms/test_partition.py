"""Partitions: every parameter in exactly one fragment, none empty, from the schema alone."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltapost.algorithms.partition import ByBytes, ByPattern, Partition, Strided, from_fields
from deltapost.errors import ConfigurationError, MalformedMessage
from deltapost.serialization import ParameterSpec, Schema

SHAPES = st.lists(st.integers(0, 50), min_size=0, max_size=2).map(tuple)
SCHEMAS = st.dictionaries(st.text("abc.0123", min_size=1, max_size=12), SHAPES, min_size=1, max_size=20).map(
    lambda shapes: Schema(tuple(ParameterSpec(name, "F32", shape) for name, shape in shapes.items()))
)


def schema_of(**elements: int) -> Schema:
    """F32 vectors; `__` in a keyword stands for a dot."""
    return Schema(tuple(ParameterSpec(name.replace("__", "."), "F32", (n,)) for name, n in elements.items()))


def transformer(blocks: int) -> Schema:
    names = [
        f"model.layers.{index}.{part}.weight" for index in range(blocks) for part in ("attention", "mlp")
    ]
    specs = [ParameterSpec(name, "BF16", (8, 8)) for name in names]
    return Schema(
        (*specs, ParameterSpec("model.embed.weight", "BF16", (64, 8)), ParameterSpec("norm", "F32", (8,)))
    )


@given(SCHEMAS, st.integers(1, 20))
def test_by_bytes_puts_every_parameter_into_exactly_one_of_count_non_empty_fragments(
    schema: Schema, count: int
) -> None:
    if count > len(schema.parameters):
        with pytest.raises(ConfigurationError, match=f"{count} fragments cannot be made of"):
            ByBytes().fragments(schema, count)
        return

    fragments = ByBytes().fragments(schema, count)

    assert len(fragments) == count
    assert all(fragments)
    assert sorted(name for names in fragments for name in names) == [spec.name for spec in schema.parameters]


@given(SCHEMAS, st.integers(1, 6))
def test_strided_deals_everything_once_or_refuses_when_blocks_and_the_rest_are_too_few(
    schema: Schema, count: int
) -> None:
    # Given at least as many blocks as fragments or not, and blocks that may all be in one fragment; a number
    # may be written with zeros in front
    in_block = {
        spec.name: re.match(r"((?:[^.]*\.)*?)([0-9]{1,9})\.", spec.name) for spec in schema.parameters
    }
    blocks = {(found[1], int(found[2])) for found in in_block.values() if found}
    rest = [name for name, found in in_block.items() if not found]
    if len(blocks) + len(rest) < count:
        with pytest.raises(ConfigurationError, match="fragment"):
            Strided().fragments(schema, count)
        return

    fragments = Strided().fragments(schema, count)

    assert len(fragments) == count
    assert all(fragments)
    assert sorted(name for names in fragments for name in names) == [spec.name for spec in schema.parameters]


@pytest.mark.parametrize("partition", [ByBytes(), Strided(), ByPattern(("*mlp*", "*attention*"))])
def test_a_partition_does_not_depend_on_the_order_in_which_a_schema_was_given(partition: Partition) -> None:
    schema = transformer(6)
    shuffled = list(schema.parameters)
    random.Random(5).shuffle(shuffled)

    assert partition.fragments(Schema(tuple(shuffled)), 3) == partition.fragments(schema, 3)


def test_by_bytes_gives_the_largest_tensor_to_the_lightest_fragment_and_breaks_ties_by_name() -> None:
    # Given 40, 24, 24, 16 and 4 bytes
    schema = schema_of(d=10, c=6, b=6, a=4, e=1)

    # Then: d to 0; b, first of the equal ones, to 1; c to 1 (24 < 40); a to 0 (40 < 48); e to 1 (48 < 56)
    assert ByBytes().fragments(schema, 2) == (("a", "d"), ("b", "c", "e"))


def test_by_bytes_counts_bytes_and_not_elements() -> None:
    schema = Schema(
        (
            ParameterSpec("wide", "F32", (6,)),
            ParameterSpec("narrow", "BF16", (10,)),
            ParameterSpec("x", "F32", (1,)),
        )
    )

    # 24, 20 and 4 bytes
    assert ByBytes().fragments(schema, 2) == (("wide",), ("narrow", "x"))


def test_by_bytes_fills_every_fragment_even_when_tensors_are_empty() -> None:
    assert ByBytes().fragments(schema_of(a=0, b=0, c=0), 3) == (("a",), ("b",), ("c",))


def test_strided_deals_blocks_in_the_order_of_their_numbers_and_never_splits_one() -> None:
    fragments = Strided().fragments(transformer(12), 4)

    blocks = [
        sorted({int(name.split(".")[2]) for name in names if ".layers." in name}) for names in fragments
    ]
    assert blocks == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_strided_gives_what_is_in_no_block_to_the_lightest_fragment() -> None:
    # Given five equal blocks over four fragments: the first holds two of them
    fragments = Strided().fragments(transformer(5), 4)

    # Then the large embedding goes to the first of the light ones, the norm to the next
    assert ["model.embed.weight" in names for names in fragments] == [False, True, False, False]
    assert ["norm" in names for names in fragments] == [False, False, True, False]


def test_strided_takes_a_number_with_zeros_in_front_for_the_same_block() -> None:
    assert Strided().fragments(schema_of(h__02__a=1, h__2__b=1, h__3__a=1), 2) == (
        ("h.02.a", "h.2.b"),
        ("h.3.a",),
    )


def test_strided_keeps_two_stacks_of_blocks_apart_and_knows_slashes() -> None:
    schema = Schema(
        tuple(
            ParameterSpec(f"{stack}/layer/{i}/w", "F32", (2,))
            for stack in ("decoder", "encoder")
            for i in range(2)
        )
    )

    assert Strided().fragments(schema, 4) == (
        ("decoder/layer/0/w",),
        ("decoder/layer/1/w",),
        ("encoder/layer/0/w",),
        ("encoder/layer/1/w",),
    )


def test_strided_takes_the_outermost_number_as_the_block() -> None:
    schema = schema_of(layers__0__experts__0__w=2, layers__0__experts__1__w=2, layers__1__experts__0__w=2)

    assert Strided().fragments(schema, 2) == (
        ("layers.0.experts.0.w", "layers.0.experts.1.w"),
        ("layers.1.experts.0.w",),
    )


def test_strided_with_more_fragments_than_it_can_fill_says_so() -> None:
    with pytest.raises(ConfigurationError, match="fragment 2 of 3 would hold no parameter") as refused:
        Strided().fragments(schema_of(layers__0__a=2, layers__0__b=2, layers__1__a=2), 3)
    assert "ByBytes" in str(refused.value)


def test_by_pattern_gives_a_parameter_to_the_first_pattern_that_matches_its_whole_name() -> None:
    schema = schema_of(experts__0__w=2, experts__1__w=2, experts__1__shared=2, router=2)

    assert ByPattern(("*shared", "experts.0.*", "experts.1.*", "router")).fragments(schema, 4) == (
        ("experts.1.shared",),
        ("experts.0.w",),
        ("experts.1.w",),
        ("router",),
    )


def test_by_pattern_deals_what_no_pattern_matches_over_the_further_fragments() -> None:
    schema = schema_of(experts__0__w=2, big=9, middle=5, small=3)

    assert ByPattern(("experts.*",)).fragments(schema, 3) == (("experts.0.w",), ("big",), ("middle", "small"))


@pytest.mark.parametrize(
    ("patterns", "count", "said"),
    [
        (("x.*",), 1, "parameter 'a' matches none of the 1 patterns"),
        (("*", "b*"), 2, "fragment 1 of 2 would hold no parameter"),
        (("a*", "b*"), 1, "2 patterns need as many fragments, not 1"),
    ],
)
def test_by_pattern_refuses_a_plan_that_leaves_something_out(
    patterns: tuple[str, ...], count: int, said: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ByPattern(patterns).fragments(schema_of(a=1, b=1), count)
    assert said in str(refused.value)


@pytest.mark.parametrize("patterns", [(), ("a", "")])
def test_by_pattern_needs_patterns(patterns: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="patterns"):
        ByPattern(patterns)


@pytest.mark.parametrize("partition", [ByBytes(), Strided(), ByPattern(("a.*", "*"))])
def test_a_partition_comes_back_equal_from_its_fields(partition: Partition) -> None:
    assert from_fields(partition.to_fields()) == partition


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "by_name"},
        {"kind": "by_bytes", "count": 4},
        {"kind": "strided", "patterns": ["a"]},
        {"kind": "by_pattern"},
        {"kind": "by_pattern", "patterns": []},
        {"kind": "by_pattern", "patterns": "a*"},
        {"kind": "by_pattern", "patterns": ["a", 3]},
        {"kind": "by_pattern", "patterns": [""]},
    ],
)
def test_fields_that_to_fields_never_wrote_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage, match="partition"):
        from_fields(fields)


@pytest.mark.parametrize("count", [0, -1, 1_025])
def test_the_number_of_fragments_is_bounded(count: int) -> None:
    with pytest.raises(ConfigurationError, match=f"not {count}"):
        ByBytes().fragments(schema_of(a=1), count)
