"""The MLX backend, for learners on Apple machines: close to the exact backends, but not exact.

MLX flushes subnormals and fuses operations as it sees fit, so elementwise arithmetic may differ in the last
bit and such a backend closes no rounds. Formats, reductions and order statistics run on the host, through the
reference in numpy, so norms, scales, codes and medians are as precise as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import mlx.core as mx
import numpy as np

from deltapost.adapters import floats, microscaling
from deltapost.adapters.ordering import middle_sum
from deltapost.adapters.reduction import tree_dot
from deltapost.errors import InvalidTensor
from deltapost.serialization.tensor import ParameterDType, QuantizedDType, TensorBytes

__all__ = ["MlxBackend", "MlxValue"]


class MlxValue:
    """A float32 MLX array. See `adapters.Value`."""

    __slots__ = ("_array",)

    def __init__(self, array: mx.array) -> None:
        self._array = array

    def __repr__(self) -> str:
        return f"MlxValue(shape={self.shape})"

    @property
    def array(self) -> mx.array:
        """The values; not to be written to."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    def to_bytes(self, dtype: ParameterDType) -> TensorBytes:
        return floats.narrow(self._host(), dtype)

    def quantize(self, dtype: QuantizedDType) -> tuple[TensorBytes, TensorBytes]:
        return microscaling.quantize(self._host(), dtype)

    def squared_norm(self) -> float:
        values = self._host()
        return tree_dot(values, values)

    def norm(self) -> float:
        return sqrt(self.squared_norm())

    def dot(self, other: MlxValue) -> float:
        self._check(other)
        return tree_dot(self._host(), other._host())

    def middle_sum(self, others: Sequence[MlxValue], trim: int) -> MlxValue:
        for other in others:
            self._check(other)
        return MlxValue(mx.array(middle_sum([self._host(), *(other._host() for other in others)], trim)))

    def is_finite(self) -> bool:
        return floats.finite(self._host())

    def zeros_like(self) -> MlxValue:
        return MlxValue(mx.zeros(self.shape, mx.float32))

    def __add__(self, other: MlxValue) -> MlxValue:
        self._check(other)
        return MlxValue(self._array + other._array)

    def __sub__(self, other: MlxValue) -> MlxValue:
        self._check(other)
        return MlxValue(self._array - other._array)

    def __mul__(self, factor: float) -> MlxValue:
        return MlxValue(self._array * floats.to_float32(factor))

    __rmul__ = __mul__

    def _host(self) -> floats.Floats:
        return np.array(self._array, np.float32, order="C")

    def _check(self, other: MlxValue) -> None:
        if self.shape != other.shape:
            raise InvalidTensor(f"values of shape {self.shape} and {other.shape} do not go together")


@dataclass(frozen=True)
class MlxBackend:
    """MLX arithmetic on its default device. Not exact: it may publish contributions, not close rounds."""

    name: ClassVar[str] = "mlx"
    exact: ClassVar[bool] = False

    def load(self, tensor: TensorBytes) -> MlxValue:
        return MlxValue(mx.array(floats.widen(tensor)))

    def dequantize(self, data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> MlxValue:
        return MlxValue(mx.array(microscaling.dequantize(data, scale, shape)))
