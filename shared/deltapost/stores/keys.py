"""Keys and metadata that every store takes, whatever is behind it.

A key is 1 to 512 characters in segments of `A-Z a-z 0-9 . _ -` divided by single slashes. No segment begins
with a dot, so that neither `..` nor a store's own hidden files can be named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

from deltapost.errors import ObjectConflict, StoreError

_SEGMENT: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_KEY: Final = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_PREFIX: Final = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")
_METADATA_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")
_METADATA_VALUE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")

#: Characters of a key: S3 takes 1,024 bytes, of which the store's own prefix needs some.
MAX_KEY_LENGTH: Final = 512

#: Bytes of an object's metadata, names and values together: S3's limit is 2 KB.
MAX_METADATA_BYTES: Final = 2_000


def check_key(key: str) -> str:
    """`key`, if a store takes it; else StoreError."""
    if len(key) > MAX_KEY_LENGTH or _KEY.fullmatch(key) is None:
        raise StoreError(
            f"the key {key!r:.120} is not valid",
            hint="segments of A-Z, a-z, 0-9, '.', '_' and '-', not beginning with '.', between single '/'",
        )
    return key


def check_prefix(prefix: str) -> str:
    """`prefix`, if it begins some valid key, or is empty; else StoreError."""
    if len(prefix) > MAX_KEY_LENGTH or _PREFIX.fullmatch(prefix) is None:
        raise StoreError(f"the prefix {prefix!r:.120} begins no valid key")
    return prefix


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of `metadata`, if every store can carry it; else StoreError."""
    copied = dict(metadata or {})
    for name, value in copied.items():
        if _METADATA_NAME.fullmatch(name) is None or (value and _METADATA_VALUE.fullmatch(value) is None):
            raise StoreError(
                f"the metadata {name!r:.80} is not valid",
                hint="names of a-z, 0-9 and '-'; values of printable ASCII without outer spaces",
            )
    size = sum(len(name) + len(value) for name, value in copied.items())
    if size > MAX_METADATA_BYTES:
        raise StoreError(f"{size} bytes of metadata, expected at most {MAX_METADATA_BYTES}")
    return copied


def check_range(offset: int, length: int | None) -> None:
    """ValueError unless `offset` and `length` count bytes."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"offset {offset} and length {length} must not be negative")


def conflict(
    key: str, data: bytes | memoryview, *, found_size: int, found_sha256: str | None = None
) -> ObjectConflict:
    """The error for a key that holds other bytes than `data`."""
    found = f"{found_size} bytes" + (f" with SHA-256 {found_sha256}" if found_sha256 else "")
    expected = f"{len(data)} bytes with SHA-256 {hashlib.sha256(data).hexdigest()}"
    return ObjectConflict(key, expected=expected, found=found)
