"""A store in this process's memory, for tests and for trying things out.

`memory://NAME` names one store per process: whoever opens the same name gets the same objects.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deltapost.errors import ObjectMissing
from deltapost.stores import Blob, ObjectInfo
from deltapost.stores.keys import check_key, check_metadata, check_prefix, check_range, conflict


@dataclass(frozen=True)
class _Object:
    data: bytes
    metadata: dict[str, str]


class MemoryStore:
    """An ObjectStore that forgets everything with its process."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore(memory://{self._name})"

    def put(self, key: str, data: bytes | memoryview, *, metadata: Mapping[str, str] | None = None) -> bool:
        check_key(key)
        new = _Object(bytes(data), check_metadata(metadata))
        with self._lock:
            existing = self._objects.setdefault(key, new)
        if existing is not new and existing.data != new.data:
            digest = hashlib.sha256(existing.data).hexdigest()
            raise conflict(key, new.data, found_size=len(existing.data), found_sha256=digest)
        return existing is new

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        check_range(offset, length)
        found = self._find(key)
        end = None if length is None else offset + length
        return Blob(found.data[offset:end], len(found.data), dict(found.metadata))

    def head(self, key: str) -> ObjectInfo:
        found = self._find(key)
        return ObjectInfo(key, len(found.data), dict(found.metadata))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            sizes = {key: len(found.data) for key, found in self._objects.items() if key.startswith(prefix)}
        return (ObjectInfo(key, sizes[key]) for key in sorted(sizes))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _find(self, key: str) -> _Object:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectMissing(key)
        return found


_shared: dict[str, MemoryStore] = {}


def shared(name: str) -> MemoryStore:
    """This process's store of that name."""
    return _shared.setdefault(name, MemoryStore(name))
