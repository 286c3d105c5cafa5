"""Payloads: safetensors without metadata. Equal tensors pack to equal bytes; only exact files are read.

A payload is an 8-byte little-endian header length, a JSON header, and the tensors' bytes. `pack` writes wider
dtypes first and names in order within a width, so that every tensor is aligned to its elements, and pads
the header with spaces to a multiple of 8.

The reader takes any order of entries, and nothing else that safetensors leaves open. It refuses, before it
parses anything, a header above MAX_HEADER_BYTES or beyond the file; then whatever JSON parsers could read
differently (duplicate keys, other fields, floats, bools, NaN, lone surrogates), metadata, and data with
overlaps, holes or a tail. It costs time and memory in proportion to the header; data is never copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn

from deltapost.errors import InvalidTensor, MalformedPayload, SchemaMismatch
from deltapost.limits import MAX_ELEMENTS, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from deltapost.serialization.schema import METADATA_KEY, name_problem
from deltapost.serialization.tensor import BITS, DType, TensorBytes, element_bytes, shape_problem

_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_FIELDS: Final = {"dtype", "shape", "data_offsets"}


class Packed(Mapping[str, TensorBytes]):
    """Tensors by name whose bytes lie in one payload already: `data`, as `pack` would write it."""

    def __init__(self, tensors: Mapping[str, TensorBytes], data: memoryview) -> None:
        self._tensors = dict(tensors)
        self.data = data

    def __getitem__(self, name: str) -> TensorBytes:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True)
class Layout:
    """Where `pack` puts tensors: the payload's first bytes, where each tensor begins, and how long it is."""

    header: bytes
    offsets: Mapping[str, int]
    size: int


def layout(entries: Mapping[str, tuple[DType, tuple[int, ...]]]) -> Layout:
    """The layout of a payload of `entries`, {name: (dtype, shape)}. Raises InvalidTensor as `pack` does."""
    return _layout(tuple((name, *entries[name]) for name in entries))


# Each round of a fragment has the same entries, and thousands of them take as long as their arithmetic.
@lru_cache(maxsize=32)
def _layout(given: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> Layout:
    entries = {name: (dtype, shape) for name, dtype, shape in given}
    names = sorted(entries, key=lambda name: (-BITS[entries[name][0]], name))
    header: dict[str, dict[str, object]] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name in names:
        if problem := name_problem(name):
            raise InvalidTensor(f"an entry cannot be named so: {problem}")
        dtype, shape = entries[name]
        begin, end = end, end + element_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        offsets[name] = begin
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = _LENGTH_BYTES + len(text)
    if len(text) > MAX_HEADER_BYTES or start + end > MAX_PAYLOAD_BYTES:
        raise InvalidTensor(
            f"{len(names)} entries make a header of {len(text)} bytes and {end} bytes of data; "
            f"a payload has at most {MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES} in all",
            hint="use more fragments",
        )
    return Layout(
        header=len(text).to_bytes(_LENGTH_BYTES, "little") + text,
        offsets={name: start + offset for name, offset in offsets.items()},
        size=start + end,
    )


def pack(tensors: Mapping[str, TensorBytes]) -> bytes:
    """The payload that holds `tensors`. Raises InvalidTensor when it would pass a limit or a name is bad.

    >>> data = pack({"w": TensorBytes("F32", (1,), bytes(4))})
    >>> unpack(data)["w"].shape
    (1,)
    """
    if isinstance(tensors, Packed):
        return bytes(tensors.data)
    found = layout({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    return b"".join([found.header, *(tensors[name].data for name in found.offsets)])


def packed(tensors: Mapping[str, TensorBytes]) -> bytes | memoryview:
    """What `pack` gives, without a copy where the tensors lie in one payload already."""
    return tensors.data if isinstance(tensors, Packed) else pack(tensors)


def unpack(data: bytes | memoryview) -> dict[str, TensorBytes]:
    """The tensors of a payload by name, as read-only views of `data`. Raises MalformedPayload."""
    view = memoryview(data).toreadonly()
    entries, start = _header(view)
    return {
        name: TensorBytes(dtype, shape, view[start + begin : start + end])
        for name, (dtype, shape, begin, end) in entries.items()
    }


def unpack_expected(
    data: bytes | memoryview, expected: Mapping[str, tuple[DType, tuple[int, ...]]]
) -> dict[str, TensorBytes]:
    """The tensors of a payload that must hold exactly the entries `expected`, as {name: (dtype, shape)}.

    Raises MalformedPayload for what is no payload, and SchemaMismatch for a missing, extra or different
    entry; both name it.
    """
    tensors = unpack(data)
    for name in expected:
        if name not in tensors:
            raise SchemaMismatch(f"the entry {name!r} is missing from the payload")
    for name, tensor in tensors.items():
        if name not in expected:
            raise SchemaMismatch(f"the payload has an entry {name!r:.100} that was not expected")
        dtype, shape = expected[name]
        if (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
            raise SchemaMismatch(
                f"the entry {name!r} is {tensor.dtype} of shape {list(tensor.shape)}, "
                f"expected {dtype} of shape {list(shape)}"
            )
    return tensors


class _Entry(NamedTuple):
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def _header(view: memoryview) -> tuple[dict[str, _Entry], int]:
    """The entries, their layout checked, and where the data starts."""
    if len(view) < _LENGTH_BYTES:
        raise MalformedPayload(f"{len(view)} bytes are too few for a payload")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedPayload(f"the header claims {length} bytes, more than {MAX_HEADER_BYTES}")
    start = _LENGTH_BYTES + length
    if start > len(view):
        raise MalformedPayload(f"the header claims {length} bytes, the payload has {len(view)}")
    raw = bytes(view[_LENGTH_BYTES:start])
    if not raw.startswith(b"{"):
        raise MalformedPayload("the header does not start with '{'")
    try:
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_constant
        )
    except (ValueError, RecursionError) as error:
        raise MalformedPayload(f"the header is no JSON: {type(error).__name__}") from error
    entries = {name: _entry(name, fields) for name, fields in parsed.items()}
    _check_layout(entries, len(view) - start)
    return entries, start


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise MalformedPayload(f"the header has the key {key[:100]!a} twice")
        made[key] = value
    return made


def _constant(text: str) -> NoReturn:
    raise MalformedPayload(f"the header has the number {text[:40]!a}, which is no integer")


def _entry(name: str, fields: object) -> _Entry:
    """The entry, if dtype, shape and offsets agree with each other. Raises MalformedPayload, naming it."""
    if name == METADATA_KEY:
        raise MalformedPayload("the payload has metadata, which payloads never carry")
    if problem := name_problem(name):
        raise MalformedPayload(problem)
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise MalformedPayload(f"the entry {name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise MalformedPayload(f"the entry {name!r} has the dtype {dtype!r:.40}, which is not known")
    if not isinstance(shape, list):
        raise MalformedPayload(f"the entry {name!r}: the shape is no list")
    if problem := shape_problem(shape):
        raise MalformedPayload(f"the entry {name!r}: {problem}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int or not 0 <= offset <= 4 * MAX_ELEMENTS for offset in offsets)
    ):
        raise MalformedPayload(f"the entry {name!r} has the offsets {offsets!r:.60}, not two integers")
    try:
        size = element_bytes(dtype, tuple(shape))
    except InvalidTensor as error:
        raise MalformedPayload(f"the entry {name!r}: {error}") from None
    if offsets[1] - offsets[0] != size:
        raise MalformedPayload(
            f"the entry {name!r} spans {offsets[1] - offsets[0]} bytes, "
            f"but {dtype} of shape {shape!r:.80} takes {size}"
        )
    return _Entry(dtype, tuple(shape), *offsets)


def _check_layout(entries: dict[str, _Entry], size: int) -> None:
    """Raises MalformedPayload unless the entries cover `size` bytes of data exactly once."""
    position = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != position:
            kind = "overlaps the entry before it" if begin < position else "leaves a hole before it"
            raise MalformedPayload(f"the entry {name!r} {kind}: it starts at {begin}, not {position}")
        position = end
    if position != size:
        problem = "is cut short" if size < position else "has trailing bytes"
        raise MalformedPayload(f"the payload {problem}: its entries take {position} bytes, it has {size}")
