"""Asks a store once, at start-up, whether it keeps the promise that everything else stands on.

Some S3-compatible servers ignore `If-None-Match`, and some write checksum trailers into the object. Neither
shows until two owners race or an auditor reads. And where the right to list is missing, S3 does not say
definitely what is not there, which verdicts depend on. The probe writes under a fresh key that no object of a
run can have.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Final

from deltapost.errors import AccessDenied, NotReadable, ObjectConflict, ObjectMissing, StoreError
from deltapost.stores import ObjectStore

_FIRST: Final = b"deltapost probe: first"
_SECOND: Final = b"deltapost probe: the other"


def probe(store: ObjectStore, key_prefix: str = "probe") -> None:
    """Returns when `store` creates once, reads back what was written and says definitely what is not there.

    Else StoreError names its flaw.

    What the store itself says (AccessDenied, StoreUnavailable …) passes through. The probe's object is
    deleted, where deleting is allowed.
    """
    key = f"{key_prefix}/{secrets.token_hex(16)}"
    _expect_definite_answer(store, key)
    try:
        if not store.put(key, _FIRST):
            raise StoreError(f"{store!r} says that the fresh key {key!r} was taken")
        if store.get(key).data != _FIRST:
            raise StoreError(
                f"{store!r} reads back other bytes than were written to {key!r}",
                hint="for an S3-compatible server set DELTAPOST_S3_CHECKSUMS=when_required",
            )
        _expect_conflict(store, key)
    finally:
        with contextlib.suppress(AccessDenied):
            store.delete(key)


def _expect_definite_answer(store: ObjectStore, key: str) -> None:
    try:
        store.get(key)
    except ObjectMissing:
        return
    except NotReadable as error:
        raise StoreError(
            f"{store!r} does not say whether the fresh key {key!r} is there: it refuses to read it",
            hint="aggregators need s3:ListBucket on the bucket and s3:GetObject below the prefix",
        ) from error
    raise StoreError(f"{store!r} has an object under the fresh key {key!r}")


def _expect_conflict(store: ObjectStore, key: str) -> None:
    try:
        store.put(key, _SECOND)
    except ObjectConflict:
        return
    raise StoreError(
        f"{store!r} overwrote the key {key!r}: it ignores 'If-None-Match: *'",
        hint="use a store with conditional writes; rounds could be committed twice on this one",
    )
