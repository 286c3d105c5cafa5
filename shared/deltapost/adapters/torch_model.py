"""A learner's torch module as named parameters: snapshots out, anchors in, the optimizer's state kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from deltapost.adapters.torch import TorchBackend, TorchValue
from deltapost.errors import ConfigurationError, SchemaMismatch
from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import ParameterDType, TensorBytes

_DTYPES: Final[dict[torch.dtype, ParameterDType]] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class TorchModel:
    """A module's parameters, or named tensors, each written in place. See `adapters.Model`.

    Tied parameters count once, under the first of their names. Frozen parameters belong to the model; pass
    `{name: p for name, p in module.named_parameters() if p.requires_grad}` to leave them out.
    """

    def __init__(self, source: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Raises ConfigurationError, naming the parameter, for dtypes other than float32, float16, bfloat16."""
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


def _spec(name: str, tensor: torch.Tensor) -> ParameterSpec:
    if tensor.is_meta:
        raise ConfigurationError(f"parameter {name!r} is on the meta device and holds no numbers")
    if tensor.dtype not in _DTYPES:
        raise ConfigurationError(
            f"parameter {name!r} has the dtype {tensor.dtype}",
            hint=f"one of {', '.join(str(dtype) for dtype in _DTYPES)}",
        )
    return ParameterSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape))
