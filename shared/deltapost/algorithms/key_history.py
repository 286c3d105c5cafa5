"""Which keys speak for a learner at a version: a fold over the registry's entries, in the order of numbers.

Every list of entries has a meaning: of a learner's entries with `from_version` ≤ v, the one with the highest
number is in force at v. Before the first, the id belongs to `learners/ID` in an open run and to nobody in a
registered one.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltapost.serialization.records import Manifest
from deltapost.serialization.registry import KeyEntry


@dataclass(frozen=True)
class Speakers:
    """The public keys that the registry allows; `owner`: the key in `learners/ID` is allowed as well."""

    keys: tuple[bytes, ...]
    owner: bool


class KeyHistory:
    """The registry of one run, as far as it was read: `number` entries, the last with the hash `head`."""

    def __init__(self, manifest: Manifest) -> None:
        self._open = manifest.admission == "open"
        self._entries: dict[str, list[KeyEntry]] = {}
        self.number = 0
        self.head = manifest.sha256

    def add(self, entry: KeyEntry, sha256: bytes) -> None:
        """Takes the next entry in; `sha256` is that of its signed bytes."""
        if (entry.number, entry.previous) != (self.number + 1, self.head):
            raise ValueError(f"entry {entry.number} does not follow entry {self.number}")
        self._entries.setdefault(entry.learner, []).append(entry)
        self.number, self.head = entry.number, sha256

    def entries(self, learner: str) -> tuple[KeyEntry, ...]:
        return tuple(self._entries.get(learner, ()))

    def learners(self) -> list[str]:
        """Every id that some entry names."""
        return sorted(self._entries)

    def in_force(self, learner: str, version: int) -> KeyEntry | None:
        """The entry that says who speaks for the learner at the base version; None: no entry does."""
        for entry in reversed(self._entries.get(learner, ())):
            if entry.from_version <= version:
                return entry
        return None

    def speakers(self, learner: str, version: int) -> Speakers:
        """The keys that count for the learner at the base version.

        The key of a rotation counts beside the one it replaces, so that a learner may change over while its
        fragments are at different versions, and no round is without a key.
        """
        entry = self.in_force(learner, version)
        keys = [entry.public_key] if entry is not None and entry.public_key is not None else []
        owner = entry is None and self._open
        newest = self._entries[learner][-1] if learner in self._entries else None
        if newest is not None and newest.action == "rotate" and newest is not entry and (keys or owner):
            assert newest.public_key is not None
            keys.append(newest.public_key)
        return Speakers(tuple(keys), owner)
