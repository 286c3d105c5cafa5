"""Codes, values and sums of one tensor in C: the bytes of `floats`, `microscaling` and `reduction`.

Every function takes the build to use and the number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from deltapost.adapters import microscaling
from deltapost.adapters.floats import Floats
from deltapost.adapters.kernels import FORMATS, NO_EXPONENT, Kernels, share, threads_for
from deltapost.adapters.microscaling import (
    F4_BLOCK,
    check_quantized,
    check_quantized_dtype,
    f8_exponent,
    padded,
)
from deltapost.adapters.reduction import BLOCK, add_blocks
from deltapost.errors import NonFinite
from deltapost.serialization.tensor import ParameterDType, QuantizedDType, TensorBytes, element_bytes


def tree_dot(found: Kernels, threads: int | None, left: Floats, right: Floats) -> float:
    """Σ left·right by the reduction tree."""
    blocks = -(-left.size // BLOCK)
    sums = np.empty(blocks, np.float32)

    def work(_part: int, begin: int, end: int) -> None:
        found.dots(left.ctypes.data, right.ctypes.data, left.size, begin, end, sums.ctypes.data)

    share(blocks, threads, work)
    return add_blocks(sums)


def narrow(found: Kernels, threads: int | None, values: Floats, dtype: ParameterDType) -> TensorBytes:
    """`values` rounded to `dtype`."""
    data = np.empty(element_bytes(dtype, values.shape), np.uint8)
    _encode(found, threads, values, dtype, 0, data, None)
    return TensorBytes(dtype, values.shape, data.tobytes())


def quantize(
    found: Kernels,
    threads: int | None,
    values: Floats,
    dtype: QuantizedDType,
    residual: Floats | None = None,
) -> tuple[TensorBytes, TensorBytes]:
    """Codes and scales of `values`, plus `residual` where there is one.

    What the codes leave out is then the new residual, in its place. Raises NonFinite.
    """
    check_quantized_dtype(dtype)
    if dtype == "F8_E4M3":
        exponent = f8_exponent(_largest(found, threads, values, residual))
        codes = np.empty(values.size, np.uint8)
        given = NO_EXPONENT if exponent is None else exponent
        _encode(found, threads, values, dtype, given, codes, None, residual)
        scale = TensorBytes("F32", (), struct.pack("<f", 2.0 ** (exponent or 0)))
        return TensorBytes("F8_E4M3", values.shape, codes.tobytes()), scale
    count = padded(values.size)
    codes, scales = np.empty(count // 2, np.uint8), np.empty(count // F4_BLOCK, np.uint8)
    if residual is not None and not np.isfinite(_largest(found, threads, values, residual)):
        raise NonFinite("a NaN or an infinity cannot be quantized to F4")  # before the residual is touched
    if _encode(found, threads, values, dtype, 0, codes, scales, residual):
        raise NonFinite("a NaN or an infinity cannot be quantized to F4")
    return (
        TensorBytes("F4", (count,), codes.tobytes()),
        TensorBytes("F8_E8M0", scales.shape, scales.tobytes()),
    )


def dequantize(
    found: Kernels, threads: int | None, data: TensorBytes, scale: TensorBytes, shape: Sequence[int]
) -> Floats:
    """The float32 values of codes and scales, in `shape`. Raises InvalidTensor."""
    wanted = check_quantized(data, scale, shape)
    codes, scales = np.frombuffer(data.data, np.uint8), np.frombuffer(scale.data, np.uint8)
    values = np.empty(prod(wanted), np.float32)

    def work(_part: int, begin: int, end: int) -> None:
        tables = (codes.ctypes.data, scales.ctypes.data)
        found.decode(FORMATS[data.dtype], *tables, values.size, begin, end, values.ctypes.data)

    share(-(-values.size // BLOCK), threads, work)
    return values.reshape(wanted)


def _largest(found: Kernels, threads: int | None, values: Floats, residual: Floats | None) -> float:
    blocks = -(-values.size // BLOCK)
    parts = np.zeros(threads_for(blocks, threads), np.uint32)
    left = residual.ctypes.data if residual is not None else None

    def work(part: int, begin: int, end: int) -> None:
        parts[part] = found.largest(values.ctypes.data, left, values.size, begin, end)

    share(blocks, threads, work)
    return float(parts.max(initial=0).astype(np.uint32).view(np.float32))


def _encode(
    found: Kernels,
    threads: int | None,
    values: Floats,
    dtype: str,
    exponent: int,
    codes: microscaling.Bytes,
    scales: microscaling.Bytes | None,
    residual: Floats | None = None,
) -> bool:
    """Whether a NaN or an infinity was among the values, as far as the format says so."""
    blocks = -(-values.size // BLOCK)
    parts = np.zeros(threads_for(blocks, threads), np.int32)
    left = residual.ctypes.data if residual is not None else None

    def work(part: int, begin: int, end: int) -> None:
        parts[part] = found.encode(
            FORMATS[dtype],
            exponent,
            values.ctypes.data,
            left,
            values.size,
            begin,
            end,
            codes.ctypes.data,
            scales.ctypes.data if scales is not None else None,
            left,
        )

    share(blocks, threads, work)
    return bool(parts.any())
