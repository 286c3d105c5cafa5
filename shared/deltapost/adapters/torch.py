"""The torch backend: exact on CPU and CUDA, because it uses only operations that have one result.

Never used here: dot, norm, sum, mean, addcmul, lerp or `alpha=`, whose bits depend on threads, instruction
sets or MKL. `torch.set_flush_denormal(True)` changes the bits of subnormals and must stay off.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import ClassVar, Final

import numpy as np
import torch

from deltapost.adapters import microscaling
from deltapost.adapters.floats import CANONICAL_NAN, to_float32
from deltapost.adapters.microscaling import F4_BLOCK, check_quantized, check_quantized_dtype, padded
from deltapost.adapters.reduction import BLOCK, add_blocks
from deltapost.errors import InvalidTensor, NonFinite
from deltapost.serialization.tensor import ParameterDType, QuantizedDType, TensorBytes

__all__ = ["TorchBackend", "TorchValue"]

#: Torch's dtype for what can be loaded alone, and the integer of its width.
FLOATS: Final = {
    "F32": (torch.float32, torch.int32),
    "F16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
}
#: Elements whose products are held at a time. Has no influence on any bit.
_AT_ONCE: Final = 1024 * BLOCK


class TorchValue:
    """A float32 tensor on some device that nothing changes. See `adapters.Value`."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        """Takes over `tensor`: contiguous float32, detached, not changed by anyone from here on."""
        self._tensor = tensor

    def __repr__(self) -> str:
        return f"TorchValue(shape={self.shape}, device={self._tensor.device})"

    @property
    def tensor(self) -> torch.Tensor:
        """The values; not to be written to."""
        return self._tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def to_bytes(self, dtype: ParameterDType) -> TensorBytes:
        if dtype not in FLOATS:
            raise InvalidTensor(
                f"values are not written as {dtype!r:.40} alone", hint="quantize them for F8_E4M3 and F4"
            )
        narrow, integer = FLOATS[dtype]
        bits = self._tensor.reshape(-1).to(narrow).view(integer)
        bits = bits.masked_fill(torch.isnan(self._tensor).reshape(-1), CANONICAL_NAN[dtype])
        return TensorBytes(dtype, self.shape, _to_host(bits))

    def quantize(self, dtype: QuantizedDType) -> tuple[TensorBytes, TensorBytes]:
        check_quantized_dtype(dtype)
        flat = self._tensor.reshape(-1)
        return _quantize_f8(flat, self.shape) if dtype == "F8_E4M3" else _quantize_f4(flat)

    def squared_norm(self) -> float:
        return _tree_dot(self._tensor, self._tensor)

    def norm(self) -> float:
        return sqrt(self.squared_norm())

    def dot(self, other: TorchValue) -> float:
        self._check(other)
        return _tree_dot(self._tensor, other._tensor)

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._tensor).all())

    def zeros_like(self) -> TorchValue:
        return TorchValue(torch.zeros_like(self._tensor))

    def __add__(self, other: TorchValue) -> TorchValue:
        self._check(other)
        return TorchValue(self._tensor + other._tensor)

    def __sub__(self, other: TorchValue) -> TorchValue:
        self._check(other)
        return TorchValue(self._tensor - other._tensor)

    def __mul__(self, factor: float) -> TorchValue:
        return TorchValue(self._tensor * to_float32(factor))

    __rmul__ = __mul__

    def _check(self, other: TorchValue) -> None:
        if self.shape != other.shape:
            raise InvalidTensor(f"values of shape {self.shape} and {other.shape} do not go together")


@dataclass(frozen=True)
class TorchBackend:
    """torch arithmetic on one device, as `torch.device` writes it: `cpu`, `cuda`, `cuda:1` …"""

    device: str = "cpu"

    name: ClassVar[str] = "torch"
    exact: ClassVar[bool] = True

    def load(self, tensor: TensorBytes) -> TorchValue:
        if tensor.dtype not in FLOATS:
            raise InvalidTensor(
                f"{tensor.dtype} cannot be loaded by itself",
                hint="dequantize F8_E4M3 and F4 with their scale; F32, F16 and BF16 can be loaded",
            )
        return TorchValue(self.plain(tensor).to(torch.float32))

    def plain(self, tensor: TensorBytes) -> torch.Tensor:
        """A tensor of F32, F16 or BF16 bytes in its own dtype, on the device, that owns its memory."""
        flat = self._bytes(tensor).view(FLOATS[tensor.dtype][0])
        return flat.reshape(tensor.shape)

    def dequantize(self, data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> TorchValue:
        wanted = check_quantized(data, scale, shape)
        codes = self._bytes(data).to(torch.int32)
        if data.dtype == "F8_E4M3":
            values = self._table(microscaling.F8_VALUES).index_select(0, codes)
            (factor,) = struct.unpack("<f", scale.data)
            return TorchValue((values * factor).reshape(wanted))
        factors = self._table(microscaling.E8M0_VALUES).index_select(0, self._bytes(scale).to(torch.int32))
        blocks = self._table(microscaling.F4_PAIRS).index_select(0, codes).reshape(-1, F4_BLOCK)
        values = blocks * factors.unsqueeze(1)
        return TorchValue(values.reshape(-1)[: prod(wanted)].reshape(wanted))

    def _bytes(self, tensor: TensorBytes) -> torch.Tensor:
        if not tensor.data:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        # The copy is needed: torch warns of, and could write to, memory that is read-only.
        return torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).to(self.device)

    def _table(self, table: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.from_numpy(table.copy()).to(self.device)


def _to_host(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.cpu().numpy().tobytes()
    return data


def _tree_dot(left: torch.Tensor, right: torch.Tensor) -> float:
    """Σ left·right by the tree of `adapters.reduction`."""
    left, right = left.reshape(-1), right.reshape(-1)
    sums: list[np.ndarray] = []  # type: ignore[type-arg]
    for start in range(0, left.numel(), _AT_ONCE):
        products = left[start : start + _AT_ONCE] * right[start : start + _AT_ONCE]
        tail = -products.numel() % BLOCK
        tree = torch.nn.functional.pad(products, (0, tail)).reshape(-1, BLOCK)
        width = BLOCK // 2
        while width:
            tree = tree[:, :width] + tree[:, width : 2 * width]
            width //= 2
        sums.append(tree.reshape(-1).cpu().numpy())
    return add_blocks(np.concatenate(sums)) if sums else 0.0


def _quantize_f8(flat: torch.Tensor, shape: tuple[int, ...]) -> tuple[TensorBytes, TensorBytes]:
    largest = flat.abs().max().item() if flat.numel() else 0.0
    exponent = microscaling.f8_exponent(largest)
    scale = TensorBytes("F32", (), struct.pack("<f", 2.0 ** (exponent or 0)))
    if exponent is None:
        return TensorBytes("F8_E4M3", shape, bytes(flat.numel())), scale
    scaled = flat * 2.0**-exponent
    if exponent == microscaling.F8_LARGEST_EXPONENT:
        scaled = scaled.clamp(-microscaling.F8_LARGEST_THERE, microscaling.F8_LARGEST_THERE)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(codes == 0x80, 0)
    return TensorBytes("F8_E4M3", shape, _to_host(codes)), scale


def _quantize_f4(flat: torch.Tensor) -> tuple[TensorBytes, TensorBytes]:
    count = padded(flat.numel())
    blocks = torch.nn.functional.pad(flat, (0, count - flat.numel())).reshape(-1, F4_BLOCK)
    if not count:
        return TensorBytes("F4", (0,), b""), TensorBytes("F8_E8M0", (0,), b"")
    field = blocks.abs().amax(dim=1).view(torch.int32) >> 23
    if bool((field == 255).any()):
        raise NonFinite("a NaN or an infinity cannot be quantized to F4")
    exponent = (field - microscaling.F4_FIELD_OFFSET).clamp(min=microscaling.SMALLEST_EXPONENT)
    exponent = exponent.masked_fill(field < microscaling.SMALLEST_FIELD, 0)
    inverse = ((127 - exponent) << 23).to(torch.int32).view(torch.float32)
    scaled = blocks * inverse.unsqueeze(1)
    magnitude = scaled.abs()
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for step, tie_goes_up in microscaling.F4_STEPS:
        codes += magnitude >= step if tie_goes_up else magnitude > step
    codes |= ((scaled < 0) & (codes != 0)).to(torch.uint8) << 3
    pairs = codes.reshape(-1, 2)
    packed = pairs[:, 0] | (pairs[:, 1] << 4)
    scales = (exponent + microscaling.E8M0_ONE).to(torch.uint8)
    return (
        TensorBytes("F4", (count,), _to_host(packed)),
        TensorBytes("F8_E8M0", (scales.numel(),), _to_host(scales)),
    )
