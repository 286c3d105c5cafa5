"""Schemas and tensors are consistent from the moment they exist."""

from __future__ import annotations

import pytest

from deltapost.errors import InvalidTensor, SchemaMismatch
from deltapost.limits import MAX_DIMENSIONS, MAX_ELEMENTS, MAX_NAME_LENGTH, MAX_PARAMETERS
from deltapost.serialization import ParameterSpec, Schema, TensorBytes, element_bytes


def spec(name: str) -> ParameterSpec:
    return ParameterSpec(name, "F32", (2,))


def test_a_schema_is_sorted_by_name_whatever_order_it_was_given_in() -> None:
    schema = Schema((spec("b"), spec("a.w"), spec("B")))

    assert schema.names == ("B", "a.w", "b")
    assert schema == Schema(tuple(reversed(schema.parameters)))
    assert (len(schema), schema.nbytes, "b" in schema, "c" in schema) == (3, 24, True, False)
    assert schema.select(["b", "B"]) == (spec("B"), spec("b"))


def test_a_parameter_that_is_not_there_is_named() -> None:
    with pytest.raises(SchemaMismatch, match="'c'"):
        Schema((spec("a"),))["c"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("w", "w.scale"),
        ("w", "w.indices"),
        ("w", "w.rows"),
        ("w", "momentum.w"),
        ("w", "master.w"),
        ("w", "residual.w"),
    ],
)
def test_names_that_deltapost_would_use_for_another_parameter_are_refused_naming_both(
    first: str, second: str
) -> None:
    with pytest.raises(InvalidTensor, match=f"'{first}' and '{second}'"):
        Schema((spec(second), spec(first)))


def test_suffixes_and_prefixes_are_free_where_they_collide_with_nothing() -> None:
    assert Schema((spec("norm.scale"), spec("momentum.encoder"), spec("w"))).names


def test_two_parameters_of_one_name_and_none_at_all_are_refused() -> None:
    with pytest.raises(InvalidTensor, match="two parameters are named 'w'"):
        Schema((spec("w"), spec("v"), spec("w")))
    with pytest.raises(InvalidTensor, match="1 to"):
        Schema(())


def test_a_schema_has_at_most_so_many_parameters() -> None:
    with pytest.raises(InvalidTensor, match=str(MAX_PARAMETERS)):
        Schema((spec("w"),) * (MAX_PARAMETERS + 1))


@pytest.mark.parametrize(
    "name", ["", "x" * (MAX_NAME_LENGTH + 1), "a\nb", "a\0", "\ud800", "__metadata__", 5]
)
def test_names_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidTensor):
        spec(name)


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "F4", "I32", ""])
def test_parameters_are_of_three_float_formats_only(dtype: str) -> None:
    with pytest.raises(InvalidTensor, match="F32, F16, BF16"):
        ParameterSpec("w", dtype, (2,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [(-1,), (True,), (2.0,), (MAX_ELEMENTS + 1,), (2**30, 2**30), (1,) * (MAX_DIMENSIONS + 1), [2], None],
)
def test_shapes_that_are_no_shapes_are_refused_by_specs_and_tensors(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTensor, match="'w'"):
        ParameterSpec("w", "F32", shape)
    with pytest.raises(InvalidTensor):
        TensorBytes("F32", shape, b"")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("F32", (), 4), ("F32", (3, 0), 0), ("BF16", (3,), 6), ("F8_E4M3", (5,), 5), ("F4", (2, 8), 8)],
)
def test_a_tensor_has_exactly_the_bytes_of_its_shape(dtype: str, shape: tuple[int, ...], size: int) -> None:
    assert element_bytes(dtype, shape) == size  # type: ignore[arg-type]
    assert TensorBytes(dtype, shape, bytes(size)).shape == shape  # type: ignore[arg-type]
    with pytest.raises(InvalidTensor, match=f"has {size} bytes, but {size + 1}"):
        TensorBytes(dtype, shape, bytes(size + 1))  # type: ignore[arg-type]


def test_an_odd_number_of_f4_elements_does_not_fill_bytes() -> None:
    with pytest.raises(InvalidTensor, match="whole bytes"):
        TensorBytes("F4", (3,), bytes(2))


def test_views_count_as_the_bytes_they_show() -> None:
    data = bytes(range(8))

    viewed = TensorBytes("F32", (2,), memoryview(b"_" + data)[1:])

    assert viewed == TensorBytes("F32", (2,), data)
    assert hash(viewed) == hash(TensorBytes("F32", (2,), data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytearray(8), "bytearray"),
        (memoryview(bytearray(8)), "writable"),
        (memoryview(bytes(8)).cast("f"), "contiguous bytes"),
        (memoryview(bytes(16))[::2], "contiguous bytes"),
        ([0] * 8, "list"),
    ],
)
def test_data_that_could_change_or_is_not_bytes_is_refused(data: object, words: str) -> None:
    with pytest.raises(InvalidTensor, match=words):
        TensorBytes("F32", (2,), data)  # type: ignore[arg-type]


def test_an_unknown_dtype_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidTensor, match="F8_E4M3"):
        TensorBytes("F64", (1,), bytes(8))  # type: ignore[arg-type]
