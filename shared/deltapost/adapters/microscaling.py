"""F8_E4M3 and F4 in numpy: how float32 values become codes and power-of-two scales, and back.

F8_E4M3 has one scale per tensor, which puts the largest magnitude in [128, 256); F4 (E2M1) one E8M0 scale
byte per block of 32, which puts it in [4, 8), clamped at 6. Rounding is to nearest, ties to even. The
formats are those of the OCP Microscaling specification 1.0; the choice of scale is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from deltapost.adapters.floats import Floats
from deltapost.errors import InvalidTensor, NonFinite
from deltapost.serialization.tensor import DType, QuantizedDType, TensorBytes

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: Elements that share one E8M0 scale.
F4_BLOCK: Final = 32
#: The exponent field of 2⁻¹²⁶, the smallest normal float32: maxima below it encode as zeros.
SMALLEST_FIELD: Final = 1
#: What is taken from a maximum's exponent field: 127, and 7 for [128, 256), or 2 for [4, 8).
F8_FIELD_OFFSET: Final = 134
F4_FIELD_OFFSET: Final = 129
#: The exponent no scale goes below, so that every scale and its inverse are normal float32 numbers.
SMALLEST_EXPONENT: Final = -126
#: The one exponent at which a code of 256 would overflow when it is decoded; there 240 is the largest.
F8_LARGEST_EXPONENT: Final = 120
F8_LARGEST_THERE: Final = 240.0
#: The E8M0 byte of scale 1.
E8M0_ONE: Final = 127
#: Where |x| passes from one E2M1 magnitude to the next; True: a tie goes up, to the even code.
F4_STEPS: Final = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
#: Elements handled at a time, for the cache. Has no influence on any bit.
_AT_ONCE: Final = 64 * 4096


def _f8_values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[(codes & 127) == 127] = np.nan
    values = np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)
    values[128] = 0.0  # a -0 that is read counts as +0
    return values


def _e8m0_values() -> Floats:
    powers = np.ldexp(1.0, np.arange(255) - 127)
    return np.append(powers, np.nan).astype(np.float32)


#: The value of each E4M3 code (NaN for 0x7F and 0xFF), each E2M1 code and each E8M0 byte (NaN for 255).
F8_VALUES: Final = _f8_values()
F4_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_VALUES: Final = _e8m0_values()
#: The two values of each byte of F4 codes, low nibble first.
F4_PAIRS: Final = np.stack([np.tile(F4_VALUES, 16), np.repeat(F4_VALUES, 16)], axis=1)
#: The same as one 8-byte item each, so that decoding is one gather.
_F4_PAIR_ITEMS: Final = F4_PAIRS.reshape(-1).view(np.complex64)


def padded(elements: int) -> int:
    """How many F4 codes a tensor of `elements` has: whole blocks of 32."""
    return -(-elements // F4_BLOCK) * F4_BLOCK


def check_quantized(data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as a tuple, if codes and scale have the dtypes and shapes it needs. Raises InvalidTensor."""
    wanted = tuple(shape)
    expected: tuple[tuple[int, ...], DType, tuple[int, ...]]
    match data.dtype:
        case "F8_E4M3":
            expected = (wanted, "F32", ())
        case "F4":
            codes = padded(prod(wanted))
            expected = ((codes,), "F8_E8M0", (codes // F4_BLOCK,))
        case other:
            raise InvalidTensor(f"{other} is not a quantized dtype", hint="F8_E4M3 and F4 are")
    if (data.shape, scale.dtype, scale.shape) != expected:
        raise InvalidTensor(
            f"a tensor of shape {wanted} is not made of {data.dtype} codes of shape {data.shape} and "
            f"{scale.dtype} scales of shape {scale.shape}",
            hint=f"codes of shape {expected[0]} and {expected[1]} scales of shape {expected[2]} are",
        )
    return wanted


def check_quantized_dtype(dtype: str) -> None:
    """Raises InvalidTensor unless `dtype` is F8_E4M3 or F4."""
    if dtype not in ("F8_E4M3", "F4"):
        raise InvalidTensor(f"values are not quantized to {dtype!r:.40}", hint="F8_E4M3 and F4 are")


def quantize(values: Floats, dtype: QuantizedDType) -> tuple[TensorBytes, TensorBytes]:
    """Codes and scales of `values`. Raises NonFinite for a NaN or an infinity, InvalidTensor for dtypes."""
    check_quantized_dtype(dtype)
    flat = values.reshape(-1)
    if dtype == "F8_E4M3":
        largest = np.maximum(flat.max(initial=0.0), -flat.min(initial=0.0))
        exponent = f8_exponent(float(largest))
        codes = np.empty(flat.size, np.uint8)
        for start in range(0, flat.size, _AT_ONCE):
            codes[start : start + _AT_ONCE] = _f8_codes(flat[start : start + _AT_ONCE], exponent)
        scale = TensorBytes("F32", (), struct.pack("<f", 2.0 ** (exponent or 0)))
        return TensorBytes("F8_E4M3", values.shape, codes.tobytes()), scale
    count = padded(flat.size)
    packed = np.empty(count // 2, np.uint8)
    scales = np.empty(count // F4_BLOCK, np.uint8)
    for start in range(0, flat.size, _AT_ONCE):
        blocks = _f4_blocks(flat[start : start + _AT_ONCE])
        low, high = start // F4_BLOCK, start // F4_BLOCK + len(blocks)
        scales[low:high] = _e8m0_bytes(blocks)
        packed[low * 16 : high * 16] = _f4_codes(blocks, scales[low:high])
    return (
        TensorBytes("F4", (count,), packed.tobytes()),
        TensorBytes("F8_E8M0", scales.shape, scales.tobytes()),
    )


def dequantize(data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> Floats:
    """The float32 values of codes and scales, in `shape`. Raises InvalidTensor."""
    wanted = check_quantized(data, scale, shape)
    codes = np.frombuffer(data.data, np.uint8)
    with np.errstate(all="ignore"):
        if data.dtype == "F8_E4M3":
            values = F8_VALUES[codes]
            values *= np.frombuffer(scale.data, "<f4")[0]
            return values.reshape(wanted)
        factors = E8M0_VALUES[np.frombuffer(scale.data, np.uint8)]
        blocks = np.take(_F4_PAIR_ITEMS, codes).view(np.float32).reshape(-1, F4_BLOCK)
        blocks *= factors[:, None]
    return blocks.reshape(-1)[: prod(wanted)].reshape(wanted)


def f8_exponent(largest: float) -> int | None:
    """The scale's exponent for a largest magnitude; None when all codes are zero. Raises NonFinite."""
    # The mask drops the sign: a maximum may be -0 or a negative NaN.
    field = (np.float32(largest).view(np.uint32).item() >> 23) & 0xFF
    if field == 255:
        raise NonFinite("a NaN or an infinity cannot be quantized to F8_E4M3")
    return max(field - F8_FIELD_OFFSET, SMALLEST_EXPONENT) if field >= SMALLEST_FIELD else None


def _f8_codes(values: Floats, exponent: int | None) -> Bytes:
    if exponent is None:
        return np.zeros(values.size, np.uint8)
    scaled = values * np.float32(2.0**-exponent)
    negative = np.signbit(scaled)
    magnitude = np.abs(scaled, out=scaled)
    if exponent == F8_LARGEST_EXPONENT:
        np.minimum(magnitude, np.float32(F8_LARGEST_THERE), out=magnitude)
    bits = magnitude.view(np.uint32)
    # Below 2⁻⁶ E4M3 is a grid of 2⁻⁹: adding 2¹⁴ makes float32's own rounding put the code in the low bits.
    subnormal = (magnitude + np.float32(2.0**14)).view(np.uint32) - np.float32(2.0**14).view(np.uint32)
    # From there on three bits of the mantissa stay and the exponent's bias goes from 127 to 7.
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - ((127 - 7) << 3)
    codes: Bytes = np.where(magnitude < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)
    codes |= (negative & (codes != 0)).view(np.uint8) << 7
    return codes


def _f4_blocks(flat: Floats) -> Floats:
    if flat.size % F4_BLOCK:
        whole = np.zeros(padded(flat.size), np.float32)
        whole[: flat.size] = flat
        flat = whole
    return flat.reshape(-1, F4_BLOCK)


def _e8m0_bytes(blocks: Floats) -> Bytes:
    field = (np.abs(blocks).max(axis=1).view(np.uint32) >> 23) & 0xFF
    if (field == 255).any():
        raise NonFinite("a NaN or an infinity cannot be quantized to F4")
    smallest = E8M0_ONE + SMALLEST_EXPONENT
    biased = np.maximum(field.astype(np.int32) - F4_FIELD_OFFSET + E8M0_ONE, smallest)
    return np.where(field >= SMALLEST_FIELD, biased, E8M0_ONE).astype(np.uint8)


def _f4_codes(blocks: Floats, scales: Bytes) -> Bytes:
    inverse = E8M0_VALUES[2 * E8M0_ONE - scales.astype(np.int32)]
    scaled = blocks * inverse[:, None]
    negative = np.signbit(scaled)
    magnitude = np.abs(scaled, out=scaled)
    codes = np.zeros(scaled.shape, np.uint8)
    for step, tie_goes_up in F4_STEPS:
        passed = magnitude >= np.float32(step) if tie_goes_up else magnitude > np.float32(step)
        codes += passed.view(np.uint8)
    codes |= (negative & (codes != 0)).view(np.uint8) << 3
    packed: Bytes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return packed.reshape(-1)
