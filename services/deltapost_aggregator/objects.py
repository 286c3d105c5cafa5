"""Objects: written create-once and read back, before any record may name them."""

from __future__ import annotations

from deltapost.errors import StoreError
from deltapost.stores import ObjectStore


def put_verified(store: ObjectStore, key: str, data: bytes) -> None:
    """Uploads under a key made of content and base, and reads the bytes back. Raises StoreError."""
    store.put(key, data)
    found = store.get(key)
    if found.data != data:
        raise StoreError(
            f"the object {key!r} reads back as {found.size} other bytes than the {len(data)} written",
            hint="something alters bytes on their way: try DELTAPOST_S3_CHECKSUMS=when_required",
        )
