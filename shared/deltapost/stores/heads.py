"""Heads: the newest version of each fragment, asked of the bucket without a listing."""

from __future__ import annotations

from deltapost.errors import NotReadable, ObjectMissing
from deltapost.serialization.names import record_key
from deltapost.stores import ObjectStore


def heads(store: ObjectStore, run: str, fragments: int) -> list[int]:
    """The newest version with a record, by fragment; 0 where there is none.

    Each is looked for from the one before it, by doubling and halving: fragments are near each other.
    """
    found: list[int] = []
    for fragment in range(fragments):
        found.append(newest_version(store, run, fragment, found[-1] if found else 0))
    return found


def newest_version(store: ObjectStore, run: str, fragment: int, near: int) -> int:
    """The newest version with a record, looked for from `near`: about 2·log₂(distance) requests."""

    def there(version: int) -> bool:
        return _there(store, run, fragment, version)

    step = 1
    if there(near):
        low = near
        while there(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = near
        while not there(high - step):
            high, step = high - step, 2 * step
        low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        if there(middle):
            low = middle
        else:
            high = middle
    return low


def reached(store: ObjectStore, run: str, fragments: int, version: int) -> bool:
    """Whether some fragment has reached the version."""
    return any(_there(store, run, fragment, version) for fragment in range(fragments))


def _there(store: ObjectStore, run: str, fragment: int, version: int) -> bool:
    if version < 1:
        return True
    try:
        # Not HEAD: a refusal without a body does not tell wrong credentials from what may not be listed.
        store.get(record_key(run, fragment, version), length=1)
    except (ObjectMissing, NotReadable):
        return False
    return True
