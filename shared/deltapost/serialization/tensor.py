"""TensorBytes: a tensor as what travels: dtype, shape and little-endian bytes that agree with each other.

The dtypes are safetensors' own names. F4 (E2M1) packs two elements a byte, low nibble first; its shape
counts elements, so it is twice as long as its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias, get_args

from deltapost.errors import InvalidTensor
from deltapost.limits import MAX_DIMENSIONS, MAX_ELEMENTS

DType: TypeAlias = Literal[
    "F32", "F16", "BF16", "F8_E4M3", "F4", "F8_E8M0", "I8", "U8", "I16", "U16", "I32", "U32", "I64"
]
#: The dtypes a parameter, an anchor and a master may have.
ParameterDType: TypeAlias = Literal["F32", "F16", "BF16"]
#: The dtypes that need a scale beside them.
QuantizedDType: TypeAlias = Literal["F8_E4M3", "F4"]

DTYPES: Final[tuple[DType, ...]] = get_args(DType)
PARAMETER_DTYPES: Final[tuple[ParameterDType, ...]] = get_args(ParameterDType)

#: Bits of one element.
BITS: Final[dict[DType, int]] = {
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F4": 4,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "I16": 16,
    "U16": 16,
    "I32": 32,
    "U32": 32,
    "I64": 64,
}

#: A read-only buffer that compares equal to bytes: bytes, or a view of bytes or of a mapped file.
Buffer: TypeAlias = bytes | memoryview


def shape_problem(shape: object) -> str | None:
    """What keeps `shape` from being a tensor's shape, in words; None when nothing does."""
    if not isinstance(shape, tuple | list):
        return f"the shape is {type(shape).__name__}, not a sequence of sizes"
    if len(shape) > MAX_DIMENSIONS:
        return f"the shape has {len(shape)} dimensions, more than {MAX_DIMENSIONS}"
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
            return f"the size {size!r:.40} is not an integer from 0 to {MAX_ELEMENTS}"
    if prod(shape) > MAX_ELEMENTS:
        return f"the shape has {prod(shape)} elements, more than {MAX_ELEMENTS}"
    return None


def element_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's elements. Raises InvalidTensor for an odd number of F4 elements."""
    count, rest = divmod(BITS[dtype] * prod(shape), 8)
    if rest:
        raise InvalidTensor(f"{dtype} of shape {tuple(shape)} does not fill whole bytes")
    return count


@dataclass(frozen=True)
class TensorBytes:
    """One tensor's bytes, checked against dtype and shape when made (InvalidTensor).

    `data` is bytes or a read-only memoryview of bytes; either compares equal to the other.

    >>> TensorBytes("F32", (2,), bytes(8)).elements
    2
    """

    dtype: DType
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise InvalidTensor(f"dtype {self.dtype!r:.40} is not known", hint=f"one of {', '.join(DTYPES)}")
        if not isinstance(self.shape, tuple):
            raise InvalidTensor(f"the shape is {type(self.shape).__name__}, not a tuple of sizes")
        if problem := shape_problem(self.shape):
            raise InvalidTensor(problem)
        expected = element_bytes(self.dtype, self.shape)
        if isinstance(self.data, memoryview):
            if self.data.format != "B" or self.data.ndim != 1 or not self.data.contiguous:
                raise InvalidTensor("the data is a view, but not of contiguous bytes", hint="view.cast('B')")
            if not self.data.readonly:
                raise InvalidTensor("the data is a writable view", hint="view.toreadonly()")
        elif not isinstance(self.data, bytes):
            raise InvalidTensor(f"the data is {type(self.data).__name__}, not bytes or a memoryview")
        if len(self.data) != expected:
            raise InvalidTensor(
                f"{self.dtype} of shape {self.shape} has {expected} bytes, but {len(self.data)} were given"
            )

    @property
    def elements(self) -> int:
        """How many elements the shape has."""
        return prod(self.shape)
