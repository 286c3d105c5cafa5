"""Dense codecs: every element of a delta in one float format, quantized ones with their scale beside them.

A tensor `w` is the entry `w`; F8_E4M3 and F4 add `w.scale`. Decoding is exact in float32: what a payload says
is what gets merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final, Literal, TypeAlias

import numpy as np

from deltapost.adapters import Backend, Value
from deltapost.adapters.mapped import slices
from deltapost.adapters.microscaling import E8M0_ONE, F4_BLOCK, F8_VALUES, padded
from deltapost.errors import InvalidTensor, MalformedPayload, NonFinite
from deltapost.serialization.schema import SCALE_SUFFIX, ParameterSpec
from deltapost.serialization.tensor import DType, TensorBytes

DenseDType: TypeAlias = Literal["F32", "F16", "BF16", "F8_E4M3", "F4"]
DENSE_DTYPES: Final[tuple[DenseDType, ...]] = ("F32", "F16", "BF16", "F8_E4M3", "F4")

#: E8M0 bytes an F4 payload may hold: with them, no product underflows float32 or overflows it.
_E8M0_ALLOWED: Final = (1, 252)
_E8M0_NAN: Final = 255
#: Elements that are checked at a time.
_AT_ONCE: Final = 1024 * 1024
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class DenseCodec:
    """One of the five dense formats. See `codecs.Codec`."""

    name: DenseDType

    def entries(self, spec: ParameterSpec) -> dict[str, tuple[DType, tuple[int, ...]]]:
        scale = spec.name + SCALE_SUFFIX
        match self.name:
            case "F8_E4M3":
                return {spec.name: ("F8_E4M3", spec.shape), scale: ("F32", ())}
            case "F4":
                codes = padded(spec.elements)
                return {spec.name: ("F4", (codes,)), scale: ("F8_E8M0", (codes // F4_BLOCK,))}
        return {spec.name: (self.name, spec.shape)}

    def encode(self, name: str, value: Value) -> dict[str, TensorBytes]:
        try:
            if self.name == "F8_E4M3" or self.name == "F4":
                data, scale = value.quantize(self.name)
                return {name: data, name + SCALE_SUFFIX: scale}
            encoded = {name: value.to_bytes(self.name)}
            _check_floats(encoded[name])
        except NonFinite as error:
            hint = "values past 65,504 need BF16 or F32" if self.name == "F16" and value.is_finite() else None
            raise NonFinite(f"tensor {name!r} as {self.name}: {error}", hint=hint) from None
        return encoded

    def check(self, spec: ParameterSpec, entries: Mapping[str, TensorBytes]) -> None:
        data = entries[spec.name]
        try:
            match self.name:
                case "F8_E4M3":
                    _check_f8(data, entries[spec.name + SCALE_SUFFIX])
                case "F4":
                    _check_e8m0(entries[spec.name + SCALE_SUFFIX])
                case _:
                    _check_floats(data)
        except (MalformedPayload, NonFinite) as error:
            raise type(error)(f"the entries of {spec.name!r}: {error}") from None

    def decode(self, spec: ParameterSpec, entries: Mapping[str, TensorBytes], backend: Backend) -> Value:
        data = entries[spec.name]
        if self.name in ("F8_E4M3", "F4"):
            return backend.dequantize(data, entries[spec.name + SCALE_SUFFIX], spec.shape)
        if data.shape != spec.shape:
            raise InvalidTensor(f"the entry {spec.name!r} has shape {data.shape}, expected {spec.shape}")
        return backend.load(data)


def _check_floats(tensor: TensorBytes) -> None:
    """Raises NonFinite for a NaN or an infinity in F32, F16 or BF16 bytes."""
    mask = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[tensor.dtype]
    bits = np.frombuffer(tensor.data, "<u4" if tensor.dtype == "F32" else "<u2")
    exponent = bits.dtype.type(mask)
    if any(((some & exponent) == exponent).any() for some in slices(bits, _AT_ONCE)):
        raise NonFinite("the values hold a NaN or an infinity")


def _check_f8(data: TensorBytes, scale: TensorBytes) -> None:
    """NonFinite: a NaN code or scale, or a product past float32. MalformedPayload: another illegal scale."""
    bits = np.frombuffer(scale.data, "<u4")[0].item()
    field, mantissa, negative = (bits >> 23) & 0xFF, bits & 0x7FFFFF, bits >> 31
    if field == 255:
        raise NonFinite("the scale is a NaN or an infinity")
    if negative or mantissa or not field:
        raise MalformedPayload(f"the scale's bits are 0x{bits:08x}, not those of a positive power of two")
    codes = np.frombuffer(data.data, np.uint8)
    largest = F8_VALUES[max(((some & 0x7F).max() for some in slices(codes, _AT_ONCE)), default=0)].item()
    if not isfinite(largest):
        raise NonFinite("the codes hold a NaN")
    if largest * 2.0 ** (field - 127) > _FLOAT32_MAX:
        raise NonFinite(f"the largest code, {largest:g}, times the scale is past float32's range")


def _check_e8m0(scale: TensorBytes) -> None:
    """NonFinite: a NaN scale. MalformedPayload: another byte outside those encoders write."""
    scales = np.frombuffer(scale.data, np.uint8)
    lowest, highest = scales.min(initial=E8M0_ONE), scales.max(initial=E8M0_ONE)
    if highest == _E8M0_NAN:
        raise NonFinite("a block's scale is a NaN")
    if lowest < _E8M0_ALLOWED[0] or highest > _E8M0_ALLOWED[1]:
        raise MalformedPayload(
            f"block scales lie in {lowest} to {highest}, outside {_E8M0_ALLOWED[0]} to {_E8M0_ALLOWED[1]}"
        )
