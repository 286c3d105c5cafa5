"""The bucket: a real MemoryStore behind the boundary. What it holds is checked as it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from deltapost.errors import StoreUnavailable
from deltapost.stores import Blob, ObjectInfo
from deltapost.stores.memory import MemoryStore
from simulator.boundary import Boundary


class FaultyStore:
    """An ObjectStore as a process sees it. The three callables hear of what really happened."""

    def __init__(
        self,
        bucket: MemoryStore,
        boundary: Boundary,
        put_done: Callable[[str, bytes], None],
        before_delete: Callable[[str], None],
        got: Callable[[str, Blob], None],
    ) -> None:
        self._bucket = bucket
        self._boundary = boundary
        self._put_done = put_done
        self._before_delete = before_delete
        self._got = got

    def put(self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> bool:
        def action() -> bool:
            created = self._bucket.put(key, data, metadata=metadata)
            if created:
                self._put_done(key, data)
            return created

        return self._boundary.call("store", "put", key, action, StoreUnavailable)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        def action() -> Blob:
            blob = self._bucket.get(key, offset=offset, length=length)
            self._got(key, blob)
            return blob

        return self._boundary.call("store", "get", key, action, StoreUnavailable)

    def head(self, key: str) -> ObjectInfo:
        return self._boundary.call("store", "head", key, lambda: self._bucket.head(key), StoreUnavailable)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._boundary.call(
            "store", "list", prefix, lambda: list(self._bucket.list(prefix)), StoreUnavailable
        )
        return iter(found)

    def delete(self, key: str) -> None:
        def action() -> None:
            self._before_delete(key)
            self._bucket.delete(key)

        self._boundary.call("store", "delete", key, action, StoreUnavailable)
