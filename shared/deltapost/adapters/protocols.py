"""What a framework must offer: Backend and Value for the arithmetic, Model for a learner's parameters.

A Value is an immutable float32 tensor. Backends with `exact = True` give, for equal input bytes, equal
bytes in every operation, as `docs/exactness.md` defines them; whatever decides an anchor's bytes goes
through one of these operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import ParameterDType, QuantizedDType, TensorBytes


class Value(Protocol):
    """A float32 tensor in some framework. Operations take values of the same backend and equal shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions; `()` for a scalar."""

    def to_bytes(self, dtype: ParameterDType) -> TensorBytes:
        """The values rounded to `dtype`, ties to even. NaNs are written as one quiet NaN per dtype."""

    def quantize(self, dtype: QuantizedDType) -> tuple[TensorBytes, TensorBytes]:
        """Codes and scales: F8_E4M3 in this shape with one F32 scale, or F4 blocks with E8M0 scales.

        F4 codes come flat, padded with zeros to whole blocks of 32. Raises NonFinite.
        """

    def squared_norm(self) -> float:
        """Σ x², by the reduction tree. Infinite when float32 squares overflow."""

    def norm(self) -> float:
        """The square root of `squared_norm`."""

    def dot(self, other: Self, /) -> float:
        """Σ xy, by the reduction tree."""

    def middle_sum(self, others: Sequence[Self], trim: int, /) -> Self:
        """For each element, self's and the others' without the `trim` lowest and highest, added in order.

        Ascending, one float32 addition after the other; ordered by bits, so −0 comes before +0 and NaNs at
        the ends. Raises InvalidTensor when nothing would be left.
        """

    def is_finite(self) -> bool:
        """Whether no element is a NaN or an infinity."""

    def zeros_like(self) -> Self:
        """+0 in this shape."""

    def __add__(self, other: Self, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...

    def __mul__(self, factor: float, /) -> Self:
        """Each element times `factor`, which is rounded to float32 first. Raises NonFinite past float32."""

    def __rmul__(self, factor: float, /) -> Self: ...


@runtime_checkable
class Backend(Protocol):
    """Makes values from bytes. Backends of one class and equal settings compare equal."""

    @property
    def name(self) -> str:
        """`native`, `torch` or `mlx`."""

    @property
    def exact(self) -> bool:
        """Whether its bytes are those of `docs/exactness.md`: only such a backend may close rounds."""

    def load(self, tensor: TensorBytes) -> Value:
        """The value of F32, F16 or BF16 bytes; NaNs and infinities are kept. Raises InvalidTensor."""

    def dequantize(self, data: TensorBytes, scale: TensorBytes, shape: Sequence[int]) -> Value:
        """The value, of `shape`, of what `Value.quantize` returned. Raises InvalidTensor.

        Total: codes and scales that admission refuses give NaNs, infinities or flushed values, no error.
        """


@runtime_checkable
class Model(Protocol):
    """A learner's parameters, wherever they live."""

    @property
    def backend(self) -> Backend:
        """Where `load` puts its values."""

    def specs(self) -> list[ParameterSpec]:
        """The parameters, sorted by name; shared ones once."""

    def load(self, name: str) -> Value:
        """A snapshot of one parameter, as float32. Raises SchemaMismatch."""

    def assign(self, name: str, tensor: TensorBytes) -> None:
        """Writes one parameter in place; the tensor object, and what refers to it, stays. SchemaMismatch."""
