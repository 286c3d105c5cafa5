"""Float formats in numpy: F32, F16 and BF16 bytes to float32 and back, the reference for every backend.

Rounding is to nearest, ties to even; subnormals and the sign of zero are kept; every NaN is written as the
format's positive quiet NaN, so that a narrowed NaN keeps its bytes however often it is loaded again.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

import numpy as np

from deltapost.errors import InvalidTensor, NonFinite
from deltapost.serialization.tensor import ParameterDType, TensorBytes

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

#: The NaN each format writes, as a bit pattern.
CANONICAL_NAN: Final[dict[ParameterDType, int]] = {"F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}


def to_float32(factor: float) -> float:
    """`factor` rounded once to float32, as a Python float. Raises NonFinite when float32 cannot hold it."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", factor))
    except OverflowError:
        raise NonFinite(f"the coefficient {factor!r} is past float32's range") from None
    return float(rounded)


def widen(tensor: TensorBytes) -> Floats:
    """The float32 values, in the tensor's shape. A read-only view of F32 bytes. Raises InvalidTensor."""
    values: Floats
    match tensor.dtype:
        case "F32":
            values = np.require(np.frombuffer(tensor.data, "<f4"), np.float32, "A")
        case "F16":
            values = np.frombuffer(tensor.data, "<f2").astype(np.float32)
        case "BF16":
            bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32)
            values = np.left_shift(bits, 16, out=bits).view(np.float32)
        case dtype:
            raise InvalidTensor(
                f"{dtype} cannot be loaded by itself",
                hint="dequantize it with its scale" if dtype in ("F8_E4M3", "F4") else "F32, F16 or BF16 can",
            )
    return values.reshape(tensor.shape)


def narrow(values: Floats, dtype: ParameterDType) -> TensorBytes:
    """`values` rounded to `dtype`. Raises InvalidTensor for other dtypes."""
    if dtype not in CANONICAL_NAN:
        raise InvalidTensor(
            f"values are not written as {dtype!r:.40} alone", hint="quantize them for F8_E4M3 and F4"
        )
    flat = np.ascontiguousarray(values).reshape(-1)
    nan = np.isnan(flat)
    data: bytes
    match dtype:
        case "F32":
            if nan.any():
                flat = np.where(nan, np.uint32(CANONICAL_NAN["F32"]).view(np.float32), flat)
            data = flat.astype("<f4", copy=False).tobytes()
        case "F16":
            with np.errstate(over="ignore"):
                half = flat.astype("<f2")
            half.view("<u2")[nan] = CANONICAL_NAN["F16"]
            data = half.tobytes()
        case "BF16":
            bits = flat.view(np.uint32)
            rounded = np.right_shift(bits, 16)
            rounded &= 1
            rounded += 0x7FFF
            with np.errstate(over="ignore"):
                rounded += bits
            rounded >>= 16
            brain = rounded.astype("<u2")
            brain[nan] = CANONICAL_NAN["BF16"]
            data = brain.tobytes()
    return TensorBytes(dtype, values.shape, data)


def finite(values: Floats) -> bool:
    """Whether no element is a NaN or an infinity."""
    return bool(np.isfinite(values).all())
