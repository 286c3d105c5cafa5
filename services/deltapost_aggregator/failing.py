"""FailingObjects: when an object that cannot be read counts as gone, and when only the store is away.

It has failed for FAILING_OBJECT_SECONDS, and another object (the run's manifest) is served right now. A
success in between begins the time anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from deltapost.errors import StoreError
from deltapost.limits import FAILING_OBJECT_SECONDS
from deltapost.serialization.names import manifest_key
from deltapost.stores import ObjectStore

#: Objects whose first failure is remembered; the oldest are forgotten, which only makes them wait again.
MAX_REMEMBERED = 10_000


class FailingObjects:
    """The failing objects of one run. Safe to use from several threads."""

    def __init__(self, store: ObjectStore, run: str, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._run = run
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._since: OrderedDict[Hashable, float] = OrderedDict()

    def failing(self, name: Hashable) -> bool:
        """Whether its last read failed, as far as is remembered."""
        with self._lock:
            return name in self._since

    def note(self, name: Hashable) -> float:
        """The object cannot be read; returns for how many seconds it has not been."""
        now = self._monotonic()
        with self._lock:
            since = self._since.setdefault(name, now)
            if len(self._since) > MAX_REMEMBERED:
                self._since.popitem(last=False)
        return now - since

    def forget(self, name: Hashable) -> None:
        """The object was read, or given up."""
        with self._lock:
            self._since.pop(name, None)

    def alone(self, name: Hashable, *, seconds: float = FAILING_OBJECT_SECONDS) -> bool:
        """Notes a failure: whether the object has failed for so long, while the store serves others."""
        if self.note(name) < seconds:
            return False
        try:
            self._store.head(manifest_key(self._run))
        except StoreError:
            return False
        return True
