"""Inbox: where the courier lays commits and the training thread takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from deltapost.errors import DeltapostError
from deltapost.learner.following import Commit

#: Longest sleep between two looks at what is waited for, in seconds: journal news ring no bell here.
LOOK_SECONDS = 0.1


class Inbox:
    """The newest undelivered commit of each fragment. Thread-safe."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._commits: dict[int, Commit] = {}
        self._failure: DeltapostError | None = None
        self._ended: set[int] = set()

    def put(self, commit: Commit) -> None:
        """Lays a commit down; it takes over the records and bytes of one that was not taken yet."""
        with self._arrived:
            before = self._commits.get(commit.fragment)
            if before is not None:
                commit = replace(
                    commit,
                    records=before.records + commit.records,
                    bytes_read=before.bytes_read + commit.bytes_read,
                )
            self._commits[commit.fragment] = commit
            self._arrived.notify_all()

    def take(self, fragment: int) -> Commit | None:
        with self._arrived:
            return self._commits.pop(fragment, None)

    def has(self, fragment: int) -> bool:
        with self._arrived:
            return fragment in self._commits

    def end(self, fragment: int) -> None:
        """No commit of this fragment comes any more but what lies here."""
        with self._arrived:
            if fragment not in self._ended:
                self._ended.add(fragment)
                self._arrived.notify_all()

    def ended(self, fragment: int) -> bool:
        return fragment in self._ended

    def fail(self, error: DeltapostError) -> None:
        """Nothing will come any more, and why: every later `check` and `wait` raises it."""
        with self._arrived:
            self._failure = error
            self._arrived.notify_all()

    def check(self) -> None:
        """Raises what `fail` was told."""
        if self._failure is not None:
            raise self._failure

    def wait(self, there: Callable[[], bool], deadline: float) -> bool:
        """Waits until `there()`; False at `deadline` (monotonic). Raises what `fail` was told."""
        with self._arrived:
            while True:
                self.check()
                if there():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._arrived.wait(min(left, LOOK_SECONDS))
