"""Objects: written create-once and read back, before any record may name them."""

from __future__ import annotations

from collections.abc import Iterator

from deltapost.errors import StoreError
from deltapost.stores import ObjectStore
from deltapost.stores.reading import pieces, read


def put_verified(store: ObjectStore, key: str, data: bytes | memoryview) -> None:
    """Uploads under a key made of content and base, and reads the bytes back. Raises StoreError."""
    store.put(key, data)
    found = _Comparison(pieces(data))
    info = read(store, key, found.add, length=len(data) + 1)
    if info.size != len(data) or not found.same():
        raise StoreError(
            f"the object {key!r} reads back as {info.size} other bytes than the {len(data)} written",
            hint="something alters bytes on their way: try DELTAPOST_S3_CHECKSUMS=when_required",
        )


class _Comparison:
    """Whether pieces that come are those of some data, however both are cut."""

    def __init__(self, written: Iterator[memoryview]) -> None:
        self._written = written
        self._left = b""
        self._same = True

    def add(self, piece: bytes) -> None:
        while piece and self._same:
            self._left = self._left or bytes(next(self._written, b""))
            count = min(len(piece), len(self._left))
            self._same = count > 0 and piece[:count] == self._left[:count]
            piece, self._left = piece[count:], self._left[count:]

    def same(self) -> bool:
        """Whether all came that was written, and nothing else."""
        return self._same and not self._left and not any(map(len, self._written))
