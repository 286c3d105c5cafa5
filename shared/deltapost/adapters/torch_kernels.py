"""Torch kernels with one result on every device: reductions, order statistics, codes and scales.

The definitions are those of `adapters.reduction`, `ordering` and `microscaling`; the bytes are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch

from deltapost.adapters import microscaling as mx
from deltapost.adapters import ordering
from deltapost.adapters.reduction import BLOCK, NARROW, add_blocks
from deltapost.errors import NonFinite
from deltapost.serialization.tensor import TensorBytes

#: Elements whose products are held at a time. Has no influence on any bit.
_AT_ONCE: Final = 256 * BLOCK


def to_device(data: bytes | memoryview, device: str) -> torch.Tensor:
    """The bytes as a flat uint8 tensor that owns its memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    # The copy is needed: torch warns of memory that is read-only, and could write to it.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def to_host(tensor: torch.Tensor) -> bytes:
    """The tensor's memory as bytes."""
    data: bytes = tensor.cpu().numpy().tobytes()
    return data


def tree_dot(left: torch.Tensor, right: torch.Tensor) -> float:
    """Σ left·right by the reduction tree, for contiguous float32 tensors of equal size."""
    left, right = left.reshape(-1), right.reshape(-1)
    sums: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for start in range(0, left.numel(), _AT_ONCE):
        products = left[start : start + _AT_ONCE] * right[start : start + _AT_ONCE]
        tree = torch.nn.functional.pad(products, (0, -products.numel() % BLOCK)).reshape(-1, BLOCK)
        width = BLOCK // 2
        while width > NARROW:
            tree = tree[:, :width] + tree[:, width : 2 * width]
            width //= 2
        columns = tree.t().contiguous()
        while width:
            columns = columns[:width] + columns[width : 2 * width]
            width //= 2
        sums.append(columns.reshape(-1).cpu().numpy())
    return add_blocks(np.concatenate(sums)) if sums else 0.0


def middle_sum(tensors: Sequence[torch.Tensor], trim: int) -> torch.Tensor:
    """For each element, the values without the `trim` lowest and highest, added in ascending order."""
    ordering.check_middle(len(tensors), trim)
    flat = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
    total = torch.empty_like(flat[0], dtype=torch.float32)
    step = ordering.chunk_size(len(flat))
    for start in range(0, total.numel(), step):
        keys = [bits[start : start + step] for bits in flat]
        rows = _sort([key ^ (key >> 31 & ordering.MAGNITUDE) for key in keys])[trim : len(flat) - trim]
        first, *rest = ((key ^ (key >> 31 & ordering.MAGNITUDE)).view(torch.float32) for key in rows)
        for row in rest:
            first = first + row
        total[start : start + step] = first
    return total.reshape(tensors[0].shape)


def _sort(keys: list[torch.Tensor]) -> list[torch.Tensor]:
    """The keys with each column in ascending order."""
    if len(keys) > ordering.MAX_EXCHANGED:
        return list(torch.sort(torch.stack(keys), dim=0).values)
    for i, j in ordering.exchanges(len(keys)):
        keys[i], keys[j] = torch.minimum(keys[i], keys[j]), torch.maximum(keys[i], keys[j])
    return keys


def quantize_f8(flat: torch.Tensor, shape: tuple[int, ...]) -> tuple[TensorBytes, TensorBytes]:
    """E4M3 codes in `shape` and their one scale. Raises NonFinite."""
    largest = flat.abs().max().item() if flat.numel() else 0.0
    exponent = mx.f8_exponent(largest)
    scale = TensorBytes("F32", (), struct.pack("<f", 2.0 ** (exponent or 0)))
    if exponent is None:
        return TensorBytes("F8_E4M3", shape, bytes(flat.numel())), scale
    scaled = flat * 2.0**-exponent
    if exponent == mx.F8_LARGEST_EXPONENT:
        scaled = scaled.clamp(-mx.F8_LARGEST_THERE, mx.F8_LARGEST_THERE)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return TensorBytes("F8_E4M3", shape, to_host(codes.masked_fill(codes == 0x80, 0))), scale


def quantize_f4(flat: torch.Tensor) -> tuple[TensorBytes, TensorBytes]:
    """E2M1 codes, padded to whole blocks, and each block's E8M0 scale. Raises NonFinite."""
    count = mx.padded(flat.numel())
    if not count:
        return TensorBytes("F4", (0,), b""), TensorBytes("F8_E8M0", (0,), b"")
    blocks = torch.nn.functional.pad(flat, (0, count - flat.numel())).reshape(-1, mx.F4_BLOCK)
    field = blocks.abs().amax(dim=1).view(torch.int32) >> 23 & 0xFF
    if bool((field == 255).any()):
        raise NonFinite("a NaN or an infinity cannot be quantized to F4")
    exponent = (field - mx.F4_FIELD_OFFSET).clamp(min=mx.SMALLEST_EXPONENT)
    exponent = exponent.masked_fill(field < mx.SMALLEST_FIELD, 0)
    inverse = ((127 - exponent) << 23).view(torch.float32)
    scaled = blocks * inverse.unsqueeze(1)
    magnitude = scaled.abs()
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for step, tie_goes_up in mx.F4_STEPS:
        codes += (magnitude >= step if tie_goes_up else magnitude > step).view(torch.uint8)
    codes |= ((scaled < 0) & (codes != 0)).view(torch.uint8) << 3
    pairs = codes.reshape(-1, 2)
    scales = (exponent + mx.E8M0_ONE).to(torch.uint8)
    return (
        TensorBytes("F4", (count,), to_host(pairs[:, 0] | (pairs[:, 1] << 4))),
        TensorBytes("F8_E8M0", (scales.numel(),), to_host(scales)),
    )


def dequantize(data: TensorBytes, scale: TensorBytes, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """The float32 values of codes and scales that `microscaling.check_quantized` passed."""
    codes = to_device(data.data, device).to(torch.int32)
    if data.dtype == "F8_E4M3":
        (factor,) = struct.unpack("<f", scale.data)
        values: torch.Tensor = _table(mx.F8_VALUES, device).index_select(0, codes) * factor
        return values.reshape(shape)
    scales = to_device(scale.data, device).to(torch.int32)
    factors = _table(mx.E8M0_VALUES, device).index_select(0, scales)
    blocks = _table(mx.F4_PAIRS, device).index_select(0, codes).reshape(-1, mx.F4_BLOCK)
    scaled: torch.Tensor = (blocks * factors.unsqueeze(1)).reshape(-1)[: prod(shape)]
    return scaled.reshape(shape)


def _table(values: np.ndarray[Any, np.dtype[np.float32]], device: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)
