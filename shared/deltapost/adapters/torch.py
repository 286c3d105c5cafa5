"""The torch backend, exact on CPU and CUDA as it uses only operations that have one result; torch models.

Never used here: dot, norm, sum, mean, addcmul, lerp or `alpha=`, whose bits depend on threads, instruction
sets or MKL. `torch.set_flush_denormal(True)` changes the bits of subnormals and must stay off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Final

import torch

from deltapost.adapters.floats import CANONICAL_NAN, to_float32
from deltapost.adapters.microscaling import check_quantized, check_quantized_dtype
from deltapost.adapters.torch_kernels import (
    dequantize,
    middle_sum,
    quantize_f4,
    quantize_f8,
    to_device,
    to_host,
    tree_dot,
)
from deltapost.errors import ConfigurationError, InvalidTensor, SchemaMismatch
from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import DType, ParameterDType, QuantizedDType, TensorBytes

__all__ = ["TorchBackend", "TorchModel", "TorchValue"]

#: Torch's dtype for what can be loaded alone, and the integer of its width.
FLOATS: Final[dict[DType, tuple[torch.dtype, torch.dtype]]] = {
    "F32": (torch.float32, torch.int32),
    "F16": (torch.float16, torch.int16),
    "BF16": (torch.bfloat16, torch.int16),
}
#: The schema's dtype for torch's.
DTYPES: Final[dict[torch.dtype, ParameterDType]] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


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
        return TensorBytes(dtype, self.shape, to_host(bits))

    def quantize(self, dtype: QuantizedDType) -> tuple[TensorBytes, TensorBytes]:
        check_quantized_dtype(dtype)
        flat = self._tensor.reshape(-1)
        return quantize_f8(flat, self.shape) if dtype == "F8_E4M3" else quantize_f4(flat)

    def squared_norm(self) -> float:
        return tree_dot(self._tensor, self._tensor)

    def norm(self) -> float:
        return sqrt(self.squared_norm())

    def dot(self, other: TorchValue) -> float:
        self._check(other)
        return tree_dot(self._tensor, other._tensor)

    def middle_sum(self, others: Sequence[TorchValue], trim: int) -> TorchValue:
        for other in others:
            self._check(other)
        return TorchValue(middle_sum([self._tensor, *(other._tensor for other in others)], trim))

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
        flat = to_device(tensor.data, self.device).view(FLOATS[tensor.dtype][0])
        return flat.reshape(tensor.shape)

    def dequantize(self, data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> TorchValue:
        wanted = check_quantized(data, scale, shape)
        return TorchValue(dequantize(data, scale, wanted, self.device))


class TorchModel:
    """A module's parameters, or named tensors, each written in place. See `adapters.Model`.

    Tied parameters count once, under the first of their names. Frozen parameters belong to the model; pass
    `{name: p for name, p in module.named_parameters() if p.requires_grad}` to leave them out.
    """

    def __init__(self, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigurationError, naming the parameter, unless it is float32, float16 or bfloat16."""
        named = source.named_parameters() if isinstance(source, torch.nn.Module) else source.items()
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in named:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor
        self._tensors = dict(sorted(tensors.items()))
        self._specs = {name: _spec(name, tensor) for name, tensor in self._tensors.items()}
        if not self._specs:
            raise ConfigurationError("the model has no parameters")

    @property
    def backend(self) -> TorchBackend:
        """On the device of the first parameter."""
        return TorchBackend(str(next(iter(self._tensors.values())).device))

    def specs(self) -> list[ParameterSpec]:
        return list(self._specs.values())

    def load(self, name: str) -> TorchValue:
        snapshot = self._tensor(name).detach().to(self.backend.device, torch.float32, copy=True)
        return TorchValue(snapshot.contiguous())

    def assign(self, name: str, tensor: TensorBytes) -> None:
        parameter, spec = self._tensor(name), self._specs[name]
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            raise SchemaMismatch(
                f"parameter {name!r} is {spec.dtype} of shape {spec.shape}, "
                f"not {tensor.dtype} of shape {tensor.shape}"
            )
        with torch.no_grad():
            parameter.copy_(TorchBackend().plain(tensor))

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise SchemaMismatch(f"the model has no parameter {name!r:.80}") from None


def _spec(name: str, tensor: object) -> ParameterSpec:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(f"parameter {name!r} is {type(tensor).__name__}, not a torch tensor")
    if tensor.layout != torch.strided:
        raise ConfigurationError(f"parameter {name!r} has the layout {tensor.layout}, not a dense one")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ConfigurationError(
            f"parameter {name!r} is an expanded view: several elements share one place in memory",
            hint="pass tensor.contiguous()",
        )
    if tensor.is_meta:
        raise ConfigurationError(f"parameter {name!r} is on the meta device and holds no numbers")
    if tensor.dtype not in DTYPES:
        raise ConfigurationError(
            f"parameter {name!r} has the dtype {tensor.dtype}",
            hint=f"one of {', '.join(str(dtype) for dtype in DTYPES)}",
        )
    return ParameterSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape))
