"""Garbage: which objects nobody needs, and their deletion; nothing that a record names, ever.

The rule is a stable predicate over the bucket alone. An object of base version v may go only when the record
of the round from v to v + 1 is there, attested by the run's key, and does not name it; or when a retention
note that the key signed covers it. Records and notes are create-once, so what is true once stays true: a late
delete, a second one, or one by a process that was stopped in between and whose ledger was restored meanwhile,
takes nothing that is needed. No record (a definite 404), or one that nobody attested: the object stays.

A record names the hashes of anchor and outer state always, but has them kept only where it is a checkpoint.
One anchor more stays: that of a fragment's last version, which the owner that ends it uploads before. It may
go once the slot after it holds another record, and stays while that is open.

That also covers the orphans of learners that were killed between upload and envelope, the inputs of a seal
that lost, and what a killed close had uploaded. Keys that `parse_key` does not know are only reported.

Failure modes. A bucket that does not answer, or contradicts itself, stops it: raised, and nothing more is
deleted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from deltapost.audit.history import Attested, BucketHistory, objects_of
from deltapost.points import Reach, nothing
from deltapost.serialization.names import OBJECT_AREAS, ParsedKey, anchor_key, parse_key
from deltapost.serialization.records import Record
from deltapost.serialization.retention import Released
from deltapost.stores import ObjectInfo

#: `kept`: named by its record, or no object of a round; `open`: no record of its base decides yet.
Judgement: TypeAlias = Literal["kept", "open", "unnamed", "released", "foreign"]

#: Keys that rounds name and that are remembered, some 150 bytes each. At four participants they are of 2,700
#: rounds, more than a pass of garbage collection has new ones.
REMEMBERED_KEYS: Final = 16_384


class Named(NamedTuple):
    """The keys that a record has kept, and that of its anchor, kept or not."""

    kept: frozenset[str]
    anchor: str


class NamedKeys:
    """What attested records name, by round: of those read last, in bounded memory. Thread-safe.

    Records and attestations never change, so what was once read from the bucket need not be read again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: OrderedDict[tuple[int, int], Named] = OrderedDict()
        self._count = 0

    def note(self, record: Record) -> Named:
        """The record was read from the bucket, and so was an attestation of it by the run's key."""
        anchor = anchor_key(record.run, record.fragment, record.base, record.anchor.sha256)
        named = Named(objects_of(record), anchor)
        with self._lock:
            before = self._named.pop((record.fragment, record.base), None)
            self._count += len(named.kept) - (0 if before is None else len(before.kept))
            self._named[record.fragment, record.base] = named
            while self._count > REMEMBERED_KEYS:
                self._count -= len(self._named.popitem(last=False)[1].kept)
        return named

    def of(self, fragment: int, base: int) -> Named | None:
        """The keys that the record of the round with this base names; None when that is not remembered."""
        with self._lock:
            return self._named.get((fragment, base))


class Judge:
    """Says of each object what the bucket says of it. `released` replaces the notes: a plan's own.

    `named` may be shared with whoever reads records anyway.
    """

    def __init__(
        self,
        history: BucketHistory,
        released: dict[int, Released] | None = None,
        *,
        named: NamedKeys | None = None,
    ) -> None:
        self._history = history
        self._named = named if named is not None else NamedKeys()
        self._planned = released
        self._released: dict[int, Released | None] = {}

    def refresh(self) -> None:
        """Looks at the retention notes again."""
        self._released.clear()

    def judge(self, key: str) -> Judgement:
        """What the bucket says of the object. Raises StoreError, HistoryError …"""
        parsed = parse_key(key)
        if parsed is None or parsed.run != self._history.run:
            return "foreign"
        if parsed.fragment is not None and parsed.fragment >= self._history.fragments:
            return "foreign"
        if parsed.area not in OBJECT_AREAS:
            return "kept"
        assert parsed.fragment is not None
        assert parsed.version is not None
        found = self._names(parsed.fragment, parsed.version)
        if found is None:
            return "open"
        named, anchor = found
        if key not in named:
            return self._last_anchor(parsed.fragment, parsed.version) if key == anchor else "unnamed"
        return "released" if self._lets_go(parsed) else "kept"

    def _names(self, fragment: int, base: int) -> Named | None:
        known = self._named.of(fragment, base)
        if known is None:
            found = self._history.read(fragment, base + 1)
            if not isinstance(found, Attested):
                return None
            known = self._named.note(found.record)
        return known

    def _last_anchor(self, fragment: int, base: int) -> Judgement:
        """What becomes of the anchor between two checkpoints: it is kept where it is the fragment's last."""
        if self._history.ended(fragment, base + 2):
            return "kept"
        return "unnamed" if isinstance(self._history.read(fragment, base + 2), Attested) else "open"

    def _lets_go(self, parsed: ParsedKey) -> bool:
        fragment, base = parsed.fragment, parsed.version
        assert fragment is not None
        assert base is not None
        if self._planned is not None:
            released = self._planned.get(fragment)
        else:
            if fragment not in self._released:
                self._released[fragment] = self._history.released(fragment)
            released = self._released[fragment]
        return released is not None and released.covers(parsed.area, base)


@dataclass
class Tally:
    """Objects and their bytes."""

    objects: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.objects += 1
        self.bytes += size


@dataclass
class Swept:
    """What a sweep saw, by area and judgement, and the keys that are nobody's."""

    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)

    def count(self, area: str, judgement: Judgement, size: int) -> None:
        self.tallies.setdefault(area, {}).setdefault(judgement, Tally()).add(size)

    def merge(self, other: Swept) -> None:
        """Adds what another sweep saw."""
        for area, tallies in other.tallies.items():
            for judgement, tally in tallies.items():
                into = self.tallies.setdefault(area, {}).setdefault(judgement, Tally())
                into.objects += tally.objects
                into.bytes += tally.bytes
        self.foreign += other.foreign

    def gone(self) -> Tally:
        """What went, or would."""
        total = Tally()
        for tallies in self.tallies.values():
            for judgement in ("unnamed", "released"):
                tally = tallies.get(judgement, Tally())
                total.objects += tally.objects
                total.bytes += tally.bytes
        return total


def sweep(
    history: BucketHistory,
    judge: Judge,
    objects: Iterable[ObjectInfo],
    *,
    delete: bool = True,
    reach: Reach = nothing,
) -> Swept:
    """Judges each object and deletes those that may go. Raises what keeps the bucket from being read."""
    swept = Swept()
    for info in objects:
        judgement = judge.judge(info.key)
        parsed = parse_key(info.key)
        swept.count(parsed.area if parsed is not None else "foreign", judgement, info.size)
        if judgement == "foreign":
            swept.foreign.append(info.key)
        if delete and judgement in ("unnamed", "released"):
            reach("gc.checked")
            history.store.delete(info.key)
            reach("gc.delete_sent")
    return swept
