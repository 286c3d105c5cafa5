"""The native backend: numpy and, where it was built, C; exact, the aggregator's default. And its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np

from deltapost.adapters import floats, kernels, microscaling, native_codes
from deltapost.adapters.buffers import ANONYMOUS, Buffers
from deltapost.adapters.ordering import middle_sum
from deltapost.adapters.reduction import tree_dot
from deltapost.errors import ConfigurationError, InvalidTensor, SchemaMismatch
from deltapost.limits import WINDOW_BYTES
from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import ParameterDType, QuantizedDType, TensorBytes

__all__ = ["ArrayModel", "NativeBackend", "NativeValue"]


@dataclass(frozen=True)
class NativeBackend:
    """Arithmetic in numpy, or in C where there is a build for this machine; exact, without any framework.

    >>> import struct
    >>> value = NativeBackend().load(TensorBytes("F32", (2,), struct.pack("<2f", 3.0, 4.0)))
    >>> value.norm()
    5.0
    """

    name: ClassVar[str] = "native"
    exact: ClassVar[bool] = True

    #: Threads of one operation; None: one per processor. Has no influence on any byte.
    threads: int | None = field(default=None, compare=False)
    #: The build that does the work: the fastest there is, the one of a level, or numpy alone.
    level: kernels.Level | Literal["fastest", "numpy"] = field(default="fastest", compare=False)
    #: Where the outputs of a round are allocated.
    buffers: Buffers = field(default=ANONYMOUS, compare=False, repr=False)
    #: Bytes of a round's mapped inputs and outputs that are in memory at once.
    window_bytes: int = field(default=WINDOW_BYTES, compare=False)

    @property
    def kernels(self) -> kernels.Kernels | None:
        """The build in use; None where numpy does everything."""
        if self.level == "numpy":
            return None
        return kernels.load(None if self.level == "fastest" else self.level)

    def load(self, tensor: TensorBytes) -> NativeValue:
        return NativeValue(floats.widen(tensor), self)

    def dequantize(self, data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> NativeValue:
        if (found := self.kernels) is not None:
            return NativeValue(native_codes.dequantize(found, self.threads, data, scale, shape), self)
        return NativeValue(microscaling.dequantize(data, scale, shape), self)


class NativeValue:
    """A float32 tensor in a numpy array that nothing changes. See `adapters.Value`."""

    __slots__ = ("_array", "_on")

    def __init__(self, array: floats.Floats, on: NativeBackend) -> None:
        """Takes over `array`: C-contiguous float32, not changed by anyone from here on."""
        self._array = array
        self._on = on

    def __repr__(self) -> str:
        return f"NativeValue(shape={self.shape})"

    @property
    def array(self) -> floats.Floats:
        """The values; not to be written to."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._array.shape
        return shape

    def to_bytes(self, dtype: ParameterDType) -> TensorBytes:
        if dtype in floats.CANONICAL_NAN and (found := self._on.kernels) is not None:
            return native_codes.narrow(found, self._on.threads, self._array, dtype)
        return floats.narrow(self._array, dtype)

    def quantize(self, dtype: QuantizedDType) -> tuple[TensorBytes, TensorBytes]:
        if (found := self._on.kernels) is not None:
            return native_codes.quantize(found, self._on.threads, self._array, dtype)
        return microscaling.quantize(self._array, dtype)

    def squared_norm(self) -> float:
        return self._tree_dot(self)

    def norm(self) -> float:
        return sqrt(self.squared_norm())

    def dot(self, other: NativeValue) -> float:
        self._check(other)
        return self._tree_dot(other)

    def middle_sum(self, others: Sequence[NativeValue], trim: int) -> NativeValue:
        for other in others:
            self._check(other)
        return NativeValue(middle_sum([self._array, *(other._array for other in others)], trim), self._on)

    def is_finite(self) -> bool:
        return floats.finite(self._array)

    def zeros_like(self) -> NativeValue:
        return NativeValue(np.zeros(self.shape, np.float32), self._on)

    def __add__(self, other: NativeValue) -> NativeValue:
        self._check(other)
        with np.errstate(all="ignore"):
            total = np.add(self._array, other._array, out=np.empty(self.shape, np.float32))
        return NativeValue(total, self._on)

    def __sub__(self, other: NativeValue) -> NativeValue:
        self._check(other)
        with np.errstate(all="ignore"):
            difference = np.subtract(self._array, other._array, out=np.empty(self.shape, np.float32))
        return NativeValue(difference, self._on)

    def __mul__(self, factor: float) -> NativeValue:
        rounded = np.float32(floats.to_float32(factor))
        with np.errstate(all="ignore"):
            product = np.multiply(self._array, rounded, out=np.empty(self.shape, np.float32))
        return NativeValue(product, self._on)

    __rmul__ = __mul__

    def _tree_dot(self, other: NativeValue) -> float:
        if (found := self._on.kernels) is not None:
            return native_codes.tree_dot(found, self._on.threads, self._array, other._array)
        return tree_dot(self._array, other._array)

    def _check(self, other: NativeValue) -> None:
        if self.shape != other.shape:
            raise InvalidTensor(f"values of shape {self.shape} and {other.shape} do not go together")


class ArrayModel:
    """A model whose parameters are numpy arrays, float32 or float16, written in place. See `adapters.Model`.

    >>> model = ArrayModel({"w": np.zeros(3, np.float32)})
    >>> model.specs()
    [ParameterSpec(name='w', dtype='F32', shape=(3,))]
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> None:
        """Raises ConfigurationError, naming the array, for other dtypes and for read-only arrays."""
        self._arrays = dict(sorted(arrays.items()))
        self._specs = {name: _spec(name, array) for name, array in self._arrays.items()}

    @property
    def backend(self) -> NativeBackend:
        return NativeBackend()

    def specs(self) -> list[ParameterSpec]:
        return list(self._specs.values())

    def load(self, name: str) -> NativeValue:
        return NativeValue(np.array(self._array(name), np.float32, order="C"), self.backend)

    def assign(self, name: str, tensor: TensorBytes) -> None:
        array, spec = self._array(name), self._specs[name]
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            raise SchemaMismatch(
                f"parameter {name!r} is {spec.dtype} of shape {spec.shape}, "
                f"not {tensor.dtype} of shape {tensor.shape}"
            )
        array[...] = floats.widen(tensor)

    def _array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        try:
            return self._arrays[name]
        except KeyError:
            raise SchemaMismatch(f"the model has no parameter {name!r:.80}") from None


def _spec(name: str, array: np.ndarray[Any, np.dtype[Any]]) -> ParameterSpec:
    if array.dtype == np.float32:
        dtype: ParameterDType = "F32"
    elif array.dtype == np.float16:
        dtype = "F16"
    else:
        raise ConfigurationError(
            f"parameter {name!r} has the numpy dtype {array.dtype}", hint="float32 and float16 can be trained"
        )
    if not array.flags.writeable:
        raise ConfigurationError(f"parameter {name!r} is a read-only array")
    return ParameterSpec(name, dtype, array.shape)
