"""digest: the SHA-256 by which deltapost names and compares everything durable."""

from __future__ import annotations

import hashlib


def digest(data: bytes | memoryview) -> bytes:
    """The 32-byte SHA-256 of `data`.

    >>> digest(b"").hex()[:16]
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(data).digest()
