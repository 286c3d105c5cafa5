"""ObjectStore: where payloads, anchors, records and every other durable byte of a run lie.

`open_store(url)` opens `s3://bucket/prefix` (extra `s3`), `file:///directory` or `memory://NAME`. All
implementations pass one conformance suite (`tests/stores/`).

Failure modes. A definite "no such key" is ObjectMissing, a refusal AccessDenied; a refused read that may just
as well mean "no such key" is NotReadable; a time-out, a 5xx or a lost connection is StoreUnavailable and says
nothing about the object. Every put is create-once, so doing it again is always safe; there is no overwrite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

__all__ = ["Blob", "ObjectInfo", "ObjectStore", "UnfinishedUpload", "UploadsStore", "open_store"]


@dataclass(frozen=True)
class ObjectInfo:
    """What `head` and `list` say of an object. `metadata` is empty in listings."""

    key: str
    size: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Blob:
    """Bytes that `get` read, and the whole object's size in bytes."""

    data: bytes
    size: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class ObjectStore(Protocol):
    """A flat, create-once key space. Keys come from `serialization.names`; data is whole bytes.

    Safe to use from several threads.
    """

    def put(self, key: str, data: bytes | memoryview, *, metadata: Mapping[str, str] | None = None) -> bool:
        """Writes the object if the key is free. True: created. False: it was there with the same bytes.

        Durable once it returns. Raises ObjectConflict (naming the key) when the key holds other bytes.
        `metadata` values are printable ASCII, at most 2,000 bytes in all.
        """

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        """The object's bytes from `offset`, at most `length` of them. Raises ObjectMissing.

        An `offset` at or past the end gives empty data. `length=cap + 1` reads no more than that of an
        oversized object, and `Blob.size` tells its true size.
        """

    def head(self, key: str) -> ObjectInfo:
        """Size and metadata. Raises ObjectMissing."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order (ASCII)."""

    def delete(self, key: str) -> None:
        """Removes the object; nothing happens when there is none."""


@dataclass(frozen=True)
class UnfinishedUpload:
    """The parts of an object that was never completed. `key` is None where the store does not know it.

    `idle_seconds`: since the last of its parts was written, by the store's own clock.
    """

    key: str | None
    upload: str
    idle_seconds: float


@runtime_checkable
class UploadsStore(Protocol):
    """What a store also does if a killed put leaves something behind in it: billed, and in no listing."""

    def unfinished(self, prefix: str, *, idle_seconds: float) -> Iterator[UnfinishedUpload]:
        """Uploads to keys that start with `prefix`, in which nothing was written for `idle_seconds`.

        Those whose key the store does not know are listed whatever the prefix.
        """

    def abort(self, upload: UnfinishedUpload) -> None:
        """Removes the parts; nothing happens when there are none. A put that still goes on starts anew."""


def open_store(url: str, **options: object) -> ObjectStore:
    """Opens the store that `url` names. See `stores.settings.StoreSettings` for S3's options."""
    from deltapost.stores.opening import open_store as opener

    return opener(url, **options)
