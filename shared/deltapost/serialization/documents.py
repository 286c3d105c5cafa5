"""Documents: typed values with exactly one byte form, in canonical msgpack.

Canonical: maps with sorted text keys, shortest integers, float64, no NaN or infinity, no extension types.
Reading is strict: the bytes must be those that writing the value gives. That one comparison refuses duplicate
keys, long integer forms, floats for integers, trailing bytes and every other second spelling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgpack
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from deltapost.errors import MalformedMessage
from deltapost.limits import (
    MAX_COUNTER,
    MAX_DOCUMENT_BYTES,
    MAX_DOCUMENT_ENTRIES,
    MAX_DOCUMENT_FIELDS,
    MAX_METRIC_NAME_LENGTH,
    MAX_METRICS,
    MAX_PAYLOAD_BYTES,
    MAX_STEP_SECONDS,
    MIN_BYTES_PER_MAP,
)
from deltapost.serialization.names import ID_PATTERN

#: The version of every framing and document layout. A reader refuses any other.
FORMAT: Final = 1

_ID: Final = re.compile(ID_PATTERN)


def few(value: object) -> object:
    """Refuses a map far too large before each of its entries becomes an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_METRICS:
        raise ValueError(f"a map of {len(value)} entries where at most {MAX_METRICS} are allowed")
    return value


Id = Annotated[str, StringConstraints(pattern=rf"^{ID_PATTERN}$")]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
PublicKey = Annotated[bytes, Field(min_length=32, max_length=32)]
Signature = Annotated[bytes, Field(min_length=64, max_length=64)]
Counter = Annotated[int, Field(ge=0, le=MAX_COUNTER)]
Seconds = Annotated[float, Field(ge=0.0)]
StepSeconds = Annotated[float, Field(ge=0.0, le=MAX_STEP_SECONDS)]
MetricName = Annotated[str, StringConstraints(pattern=rf"^[a-z0-9_.]{{1,{MAX_METRIC_NAME_LENGTH}}}$")]
Metrics = Annotated[dict[MetricName, float], Field(max_length=MAX_METRICS), BeforeValidator(few)]

#: For the arrays of documents: a million wrong items are one error, not a million.
FIRST_ERROR: Final = FailFast()

D = TypeVar("D", bound="Document")


class Document(BaseModel):
    """Base of every message, manifest, record and attestation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_more_fields_than_there_are(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError(f"{len(value)} fields, {cls.__name__} has {len(cls.model_fields)}")
        return value

    def to_bytes(self) -> bytes:
        """The canonical bytes: equal values, equal bytes."""
        return encode_canonical(self.model_dump())

    @classmethod
    def from_bytes(cls: type[D], data: bytes, *, limit: int = MAX_DOCUMENT_BYTES) -> D:
        """Reads exactly what `to_bytes` wrote; anything else is MalformedMessage, naming type and field."""
        return cls.from_plain(decode_plain(data, what=cls.__name__, limit=limit), data)

    @classmethod
    def from_arguments(cls: type[D], **fields: Any) -> D:
        """The document with these fields; MalformedMessage names the first that is out of range."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise MalformedMessage(f"{cls.__name__}: {_first(error)}") from None

    @classmethod
    def from_plain(cls: type[D], plain: object, data: bytes) -> D:
        """The document in an already decoded value, checked against the bytes it came from."""
        try:
            document = cls.model_validate(plain)
        except ValidationError as error:
            raise MalformedMessage(f"{cls.__name__}: {_first(error)}") from None
        except RecursionError:
            raise MalformedMessage(f"{cls.__name__}: nested too deeply") from None
        if document.to_bytes() != data:
            raise MalformedMessage(f"{cls.__name__}: the bytes are not the canonical form of their value")
        return document


class ObjectRef(Document):
    """An object in the bucket by content; its key follows from where the reference stands."""

    sha256: Digest
    size: Annotated[int, Field(ge=0, le=MAX_PAYLOAD_BYTES)]


def encode_canonical(value: object) -> bytes:
    """Canonical msgpack of None, bool, int, finite float, str, bytes, sequences and text-keyed maps."""
    packed: bytes = msgpack.packb(_canonical(value), use_bin_type=True, strict_types=True)
    return packed


_AS_THEY_ARE: Final = frozenset({type(None), bool, int, str, bytes})


def _canonical(value: object) -> object:
    if type(value) in _AS_THEY_ARE:  # most of what is read and written: everything below is for the rest
        return value
    match value:
        case None | bool() | int() | str() | bytes():
            return value
        case float():
            if not math.isfinite(value):
                raise MalformedMessage("a document holds a number that is not finite")
            return value
        case list() | tuple():
            return [_canonical(item) for item in value]
        case Mapping():
            for key in value:
                if type(key) is not str:
                    raise MalformedMessage(f"a document's map has a key of type {type(key).__name__}")
            return {
                key: item if type(item := value[key]) in _AS_THEY_ARE else _canonical(item)
                for key in sorted(value)
            }
    raise MalformedMessage(f"a document cannot hold a {type(value).__name__}")


def decode_plain(data: bytes, *, what: str, limit: int) -> Any:
    """msgpack to plain values, arrays as tuples. Every way it can fail is MalformedMessage.

    `what` names the thing in the error; `limit` is in bytes and is checked before anything is parsed.
    """
    if len(data) > limit:
        raise MalformedMessage(f"{what}: {len(data)} bytes, at most {limit} are read")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=False,
            strict_map_key=True,
            ext_hook=_no_extension,
            object_hook=_MapCheck(len(data), what),
            max_array_len=MAX_DOCUMENT_ENTRIES,
            max_map_len=MAX_DOCUMENT_ENTRIES,
        )
    except MalformedMessage:
        raise
    except Exception as error:  # noqa: BLE001  ValueError, TypeError, UnicodeDecodeError …
        raise MalformedMessage(f"{what}: not readable as msgpack: {type(error).__name__}") from None


class _MapCheck:
    """Stops a bomb while it is read: eight million empty maps in as many bytes would be 500 MB of memory.

    It also keeps pydantic, which lists every error it finds, from finding millions.
    """

    def __init__(self, size: int, what: str) -> None:
        self._left = MAX_DOCUMENT_FIELDS + size // MIN_BYTES_PER_MAP
        self._large = 1
        self._what = what

    def __call__(self, read: dict[str, Any]) -> dict[str, Any]:
        self._left -= 1
        if len(read) > MAX_DOCUMENT_FIELDS:
            self._large -= 1
            if not all(_counts(key, value) for key, value in read.items()):
                self._large = -1
        if self._left < 0 or self._large < 0:
            raise MalformedMessage(f"{self._what}: more maps, or larger ones, than any such document has")
        return read


def _counts(key: object, value: object) -> bool:
    """Whether this is a learner and how many there are of something."""
    is_id = isinstance(key, str) and _ID.fullmatch(key) is not None
    return is_id and type(value) is int and 1 <= value <= MAX_COUNTER


def _no_extension(code: int, _data: bytes) -> object:
    raise MalformedMessage(f"extension type {code} is not allowed")


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "value"
    return f"field {where!r:.80}: {first['msg']}"
