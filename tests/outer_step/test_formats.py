"""Float formats: what is rounded where, and the same bytes from every backend."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost.adapters import Value
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.torch import TorchBackend
from deltapost.errors import InvalidTensor, NonFinite
from deltapost.serialization import TensorBytes
from outer_step.tensors import BACKENDS, EXACT, ODD_SHAPES, bits, f32, numbers, rough, values_of

NATIVE, TORCH = NativeBackend(), TorchBackend()
FLOATS = ("F32", "F16", "BF16")
QUANTIZED = ("F8_E4M3", "F4")

#: The 126 E4M3 magnitudes and the 8 of E2M1, by code.
E4M3 = [Fraction(c & 7, 512) if c < 8 else Fraction(8 + (c & 7), 8) * Fraction(2) ** ((c >> 3) - 7)
        for c in range(127)]  # fmt: skip
E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest(magnitude: Fraction, grid: list[Fraction]) -> int:
    """The code of the grid value nearest to `magnitude`, the even one of two; at most the last."""
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - magnitude), code % 2))


def every_pattern() -> TensorBytes:
    """Float32 numbers with every sign, exponent and upper mantissa, and lower bits around every rounding."""
    lows = (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    patterns = [(high << 16) | low for high in range(0x10000) for low in lows]
    return bits(*patterns)


@pytest.mark.parametrize("dtype", FLOATS)
def test_native_and_torch_narrow_every_kind_of_number_to_the_same_bytes(dtype: str) -> None:
    data = every_pattern()

    assert NATIVE.load(data).to_bytes(dtype) == TORCH.load(data).to_bytes(dtype)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_native_and_torch_widen_every_pattern_to_the_same_floats(dtype: str) -> None:
    every = TensorBytes(dtype, (65536,), np.arange(65536, dtype="<u2").tobytes())

    assert NATIVE.load(every).to_bytes("F32") == TORCH.load(every).to_bytes("F32")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_narrowing_what_was_widened_gives_the_bytes_back_except_for_nan_payloads(dtype: str) -> None:
    every = np.arange(65536, dtype="<u2")
    exponent, mantissa = (0x7C00, 0x03FF) if dtype == "F16" else (0x7F80, 0x007F)
    nan = ((every & exponent) == exponent) & ((every & mantissa) != 0)
    expected = np.where(nan, 0x7E00 if dtype == "F16" else 0x7FC0, every).astype("<u2")

    back = NATIVE.load(TensorBytes(dtype, (65536,), every.tobytes())).to_bytes(dtype)

    assert back.data == expected.tobytes()


@pytest.mark.parametrize("backend", EXACT)
def test_ties_go_to_even_and_subnormals_and_the_sign_of_zero_stay(backend: str) -> None:
    value = BACKENDS[backend].load(f32(1 + 2**-11, 1 + 3 * 2**-11, -(2.0**-24), -0.0, 65520.0))

    half = struct.unpack("<5H", value.to_bytes("F16").data)

    assert half == (0x3C00, 0x3C02, 0x8001, 0x8000, 0x7C00)
    assert BACKENDS[backend].load(bits(1, 0x80000001)).to_bytes("F32") == bits(1, 0x80000001)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_all_backends_quantize_odd_shapes_to_the_same_bytes_and_back(
    dtype: str, shape: tuple[int, ...]
) -> None:
    data = rough(shape, 11, 20)
    codes = {name: backend.load(data).quantize(dtype) for name, backend in BACKENDS.items()}
    back = {name: BACKENDS[name].dequantize(*codes[name], shape).to_bytes("F32") for name in BACKENDS}

    assert codes["native"] == codes["torch"] == codes["mlx"]
    assert back["native"] == back["torch"]
    assert back["native"].shape == shape
    assert all(type(tensor.data) is bytes for tensor in (*codes["native"], *codes["torch"]))


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_native_and_torch_agree_to_the_byte_in_arithmetic_on_odd_shapes(
    shape: tuple[int, ...], dtype: str
) -> None:
    def results(backend: NativeBackend | TorchBackend) -> list[TensorBytes | float]:
        left: Value = backend.load(rough(shape, 21))
        right: Value = backend.load(rough(shape, 22))
        made = [left + right, left - right, left * 0.1, 1e-3 * right, left.zeros_like()]
        return [value.to_bytes(dtype) for value in made] + [left.dot(right), left.norm()]

    native, other = results(NATIVE), results(TORCH)

    assert native == other
    assert all(tensor.shape == shape for tensor in native if isinstance(tensor, TensorBytes))


@pytest.mark.parametrize("exponent", [-126, -10, 0, 119])
def test_e4m3_codes_are_the_nearest_of_the_grid_with_ties_to_even(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 200)
    halves = [float((a + b) / 2) for a, b in pairwise(E4M3) if b <= 256]
    scaled = [200.0, *halves, *np.nextafter(np.float32(halves), np.float32(0)).tolist()]
    scaled += (rng.random(60) * np.exp2(rng.integers(-12, 8, 60))).tolist()
    data = f32(*(math.ldexp(struct.unpack("<f", struct.pack("<f", x))[0], exponent) for x in scaled))

    codes, scale = NATIVE.load(data).quantize("F8_E4M3")

    assert numbers(scale) == [math.ldexp(1.0, exponent)]
    exact = [Fraction(x) / Fraction(2) ** exponent for x in numbers(data)]
    assert list(codes.data) == [nearest(magnitude, E4M3) for magnitude in exact]
    assert TORCH.load(data).quantize("F8_E4M3") == (codes, scale)


@settings(max_examples=40)
@given(st.lists(st.floats(-7.75, 7.75, width=32), min_size=31, max_size=31), st.integers(-120, 120))
def test_e2m1_codes_are_the_nearest_of_the_grid_with_ties_to_even(values: list[float], exponent: int) -> None:
    data = f32(*(math.ldexp(value, exponent) for value in [*values, 4.0]))

    codes, scale = NATIVE.load(data).quantize("F4")

    assert scale.data == bytes([127 + exponent])
    nibbles = [nibble for byte in codes.data for nibble in (byte & 15, byte >> 4)]
    exact = [Fraction(x) / Fraction(2) ** exponent for x in numbers(data)]
    assert [nibble & 7 for nibble in nibbles] == [nearest(abs(x), E2M1) for x in exact]
    assert [nibble >> 3 for nibble in nibbles] == [
        int(x < 0 and nibble & 7 != 0) for x, nibble in zip(exact, nibbles, strict=True)
    ]
    assert TORCH.load(data).quantize("F4") == (codes, scale)


@pytest.mark.parametrize("backend", EXACT)
def test_e2m1_ties_go_to_the_even_code(backend: str) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.5]

    codes, scale = BACKENDS[backend].load(f32(*ties)).quantize("F4")

    assert values_of(BACKENDS[backend].dequantize(codes, scale, (8,))) == [0, 1, 1, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_quantizes_to_negative_zero_and_negative_zero_codes_read_as_zero(backend: str) -> None:
    value = BACKENDS[backend].load(f32(-0.0, -1e-9, 4.0))
    codes, scale = value.quantize("F8_E4M3")
    assert codes.data[:2] == b"\0\0"
    four, _ = value.quantize("F4")
    assert four.data[0] == 0

    read = BACKENDS[backend].dequantize(TensorBytes("F8_E4M3", (1,), b"\x80"), scale, (1,))
    nibbles = TensorBytes("F4", (32,), b"\x88" * 16)
    read_four = BACKENDS[backend].dequantize(nibbles, TensorBytes("F8_E8M0", (1,), b"\x7f"), (32,))

    assert read.to_bytes("F32") == f32(0.0)
    assert read_four.to_bytes("F32") == f32(*[0.0] * 32)


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("largest", [0.0, -0.0, 1e-40, 2.0**-126 - 2.0**-149])
def test_a_maximum_below_the_smallest_normal_number_encodes_as_zeros_with_scale_one(
    backend: str, largest: float
) -> None:
    value = BACKENDS[backend].load(f32(*[largest] * 3))

    codes, scale = value.quantize("F8_E4M3")
    four, scales = value.quantize("F4")

    assert (codes.data, numbers(scale)) == (bytes(3), [1.0])
    assert (four.data, scales.data) == (bytes(16), bytes([127]))
    assert values_of(BACKENDS[backend].dequantize(four, scales, (3,))) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", EXACT)
def test_a_zero_block_beside_a_large_one_stays_zero_without_a_nan(backend: str) -> None:
    value = BACKENDS[backend].load(f32(*[6.0] * 32, *[1e-40] * 32))

    codes, scales = value.quantize("F4")

    assert scales.data == bytes([127, 127])
    assert values_of(BACKENDS[backend].dequantize(codes, scales, (64,))) == [6.0] * 32 + [0.0] * 32


@pytest.mark.parametrize("backend", EXACT)
def test_the_smallest_normal_number_survives_at_the_smallest_scale(backend: str) -> None:
    value = BACKENDS[backend].load(f32(2.0**-126, 2.0**-127))

    f8, scale = value.quantize("F8_E4M3")
    f4, scales = value.quantize("F4")

    assert numbers(scale) == [2.0**-126]
    assert scales.data == bytes([1])
    assert values_of(BACKENDS[backend].dequantize(f8, scale, (2,))) == [2.0**-126, 2.0**-127]
    assert values_of(BACKENDS[backend].dequantize(f4, scales, (2,))) == [2.0**-126, 2.0**-127]


@pytest.mark.parametrize("backend", EXACT)
def test_the_largest_floats_are_rounded_down_instead_of_overflowing(backend: str) -> None:
    top = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
    value = BACKENDS[backend].load(f32(top, -248 * 2.0**120, 244 * 2.0**120, 232 * 2.0**120))

    f8, scale = value.quantize("F8_E4M3")
    f4, scales = value.quantize("F4")

    assert values_of(BACKENDS[backend].dequantize(f8, scale, (4,))) == [
        240 * 2.0**120,
        -240 * 2.0**120,
        240 * 2.0**120,
        224 * 2.0**120,
    ]
    assert scales.data == bytes([252])
    assert values_of(BACKENDS[backend].dequantize(f4, scales, (4,)))[0] == 6 * 2.0**125


def test_native_and_torch_dequantize_every_code_and_scale_to_the_same_floats() -> None:
    codes = TensorBytes("F8_E4M3", (256,), bytes(range(256)))
    for exponent in (-126, -120, 0, 119, 120):
        scale = f32(math.ldexp(1.0, exponent), shape=())
        scale = TensorBytes("F32", (), scale.data)
        mine = NATIVE.dequantize(codes, scale, (256,)).to_bytes("F32")
        assert mine == TORCH.dequantize(codes, scale, (256,)).to_bytes("F32")
    nibbles = TensorBytes("F4", (256 * 512,), bytes(range(256)) * 256)
    scales = TensorBytes("F8_E8M0", (256 * 16,), bytes(byte for byte in range(256) for _ in range(16)))
    shape = (256 * 512,)
    mine = NATIVE.dequantize(nibbles, scales, shape).to_bytes("F32")
    assert mine == TORCH.dequantize(nibbles, scales, shape).to_bytes("F32")


def test_e4m3_codes_read_as_torch_reads_them() -> None:
    codes = bytes(code for code in range(256) if code != 128)
    theirs = torch.frombuffer(bytearray(codes), dtype=torch.float8_e4m3fn).to(torch.float32)

    scale = TensorBytes("F32", (), f32(1.0).data)
    mine = NATIVE.dequantize(TensorBytes("F8_E4M3", (255,), codes), scale, (255,)).array

    assert np.array_equal(mine, theirs.numpy(), equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_nan_or_infinity_cannot_be_quantized(backend: str, bad: float, dtype: str) -> None:
    with pytest.raises(NonFinite, match=dtype):
        BACKENDS[backend].load(f32(1.0, bad, 2.0)).quantize(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_scales_and_shape_must_belong_together(backend: str) -> None:
    codes, scales = BACKENDS[backend].load(f32(*range(40))).quantize("F4")

    with pytest.raises(InvalidTensor, match=r"\(65,\)"):
        BACKENDS[backend].dequantize(codes, scales, (65,))
    with pytest.raises(InvalidTensor, match="F32"):
        BACKENDS[backend].dequantize(codes, f32(1.0), (40,))
    with pytest.raises(InvalidTensor, match="not a quantized dtype"):
        BACKENDS[backend].dequantize(f32(1.0), f32(1.0), (1,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_that_do_not_fit_a_dtype_or_shape_say_what_does(backend: str) -> None:
    value = BACKENDS[backend].load(f32(1.0, 2.0))

    with pytest.raises(InvalidTensor, match="quantize them"):
        value.to_bytes("F4")
    with pytest.raises(InvalidTensor, match="F8_E4M3 and F4"):
        value.quantize("F16")
    with pytest.raises(InvalidTensor, match="scale"):
        BACKENDS[backend].load(TensorBytes("F8_E4M3", (1,), b"\0"))
    with pytest.raises(InvalidTensor, match=r"\(2,\) and \(1,\)"):
        value + BACKENDS[backend].load(f32(1.0))
    with pytest.raises(NonFinite, match="coefficient"):
        value * 1e39


@pytest.mark.parametrize("backend", BACKENDS)
def test_nans_of_any_payload_are_written_as_one_nan_per_dtype(backend: str) -> None:
    value = BACKENDS[backend].load(bits(0x7F800001, 0xFFC12345, 0x7FFFFFFF))

    assert value.to_bytes("F32") == bits(*[0x7FC00000] * 3)
    assert value.to_bytes("F16").data == struct.pack("<3H", *[0x7E00] * 3)
    assert value.to_bytes("BF16").data == struct.pack("<3H", *[0x7FC0] * 3)
    assert not value.is_finite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_load_from_unaligned_views_of_a_larger_buffer(backend: str) -> None:
    inner = f32(1.5, -2.0, 3.25)
    view = memoryview(b"x" + bytes(inner.data) + b"y")[1:-1]

    value = BACKENDS[backend].load(TensorBytes("F32", (3,), view))

    assert value.to_bytes("F32") == inner


def test_backends_with_equal_settings_are_equal() -> None:
    assert NativeBackend() == NativeBackend()
    assert TorchBackend() == TorchBackend("cpu")
    assert TorchBackend() != NativeBackend()
    assert [backend.exact for backend in BACKENDS.values()] == [True, True, True, False]
