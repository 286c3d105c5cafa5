"""Caution: after a start that follows a death, entries are read one at a time, each noted before it is read.

So an entry that kills its reader is found, whoever owns the fragment, and skipped after MAX_STARTS_AT_ENTRY
starts (see `ledger.suspects`). An exception that nobody foresaw counts like a death: nothing that a sender
can write stops the stream for good. In one process only one fragment at a time reads so: a death is blamed
on the entry that was being read, not on those that others had before them.

Failure modes. A store that does not answer delays a noted reading instead of counting against the entry. An
owner that loses its lease while it reads takes its note back when it has one again: it lives. A process that
is killed from outside counts, if that comes while the entry is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from deltapost.errors import DeltapostError
from deltapost.events import events
from deltapost.ledger import suspects
from deltapost.ledger.leases import Lease
from deltapost.limits import MAX_STARTS_AT_ENTRY
from deltapost.serialization.names import manifest_key
from deltapost.streams import Entry
from deltapost_aggregator.context import RunContext

logger = events(__name__)

#: Entries judged in one transaction: bounds what is judged again after a crash.
BATCH_ENTRIES = 256
#: Seconds between two renewals of the lease while another fragment's suspect is read.
_TURN_SECONDS = 1.0


class Caution:
    """How one fragment's owner reads: whole batches, or one entry at a time. Used by one worker thread."""

    def __init__(self, context: RunContext, fragment: int) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._left = 0
        self._skipped: frozenset[bytes] = frozenset()

    def begin(self, lease: Lease) -> None:
        """The fragment was taken over: finds out whether the owner before died where it began to read."""
        survived = self._context.noted.get(self._fragment)
        inherited = suspects.begin(self._services.ledger, lease, survived=survived)
        self._skipped = inherited.skipped
        self._context.noted.pop(self._fragment, None)
        self._left = BATCH_ENTRIES if inherited.careful else 0

    @property
    def limit(self) -> int:
        """How many entries to read at a time."""
        return 1 if self._left else BATCH_ENTRIES

    def skips(self, entry: Entry) -> bool:
        """Whether the entry killed its readers often enough."""
        return bool(self._skipped) and _sha256(entry) in self._skipped

    @contextmanager
    def reading(
        self, lease: Lease, entries: Sequence[Entry], hold_lease: Callable[[], object]
    ) -> Iterator[None]:
        """Around everything that is done with the entries, their verdicts' transaction included."""
        if not self._left or len(entries) != 1:
            try:
                yield
            except DeltapostError:
                raise
            except Exception:
                self._left = BATCH_ENTRIES
                raise
            return
        with self._alone(hold_lease):
            entry = _sha256(entries[0])
            if entry not in self._skipped:
                self._note(lease, entry)
            try:
                yield
            except DeltapostError:
                self._clear(lease)
                raise
            except Exception:
                self._context.noted.pop(self._fragment, None)
                raise
            self._clear(lease)
            self._left -= 1

    @contextmanager
    def _alone(self, hold_lease: Callable[[], object]) -> Iterator[None]:
        while not self._services.suspect_read.acquire(timeout=_TURN_SECONDS):
            hold_lease()
        try:
            yield
        finally:
            self._services.suspect_read.release()

    def _note(self, lease: Lease, entry: bytes) -> None:
        if entry == self._context.noted.get(self._fragment):
            return
        self._services.store.head(manifest_key(self._context.run))  # an outage is not the entry's fault
        starts = suspects.note(self._services.ledger, lease, entry)
        self._context.noted[self._fragment] = entry
        if starts >= MAX_STARTS_AT_ENTRY:
            self._skipped |= {entry}
            logger.error(
                "entry_skipped",
                extra={
                    "run": self._context.run,
                    "fragment": self._fragment,
                    "entry": entry.hex(),
                    "starts": starts,
                },
            )

    def _clear(self, lease: Lease) -> None:
        suspects.cleared(self._services.ledger, lease)
        self._context.noted.pop(self._fragment, None)


def _sha256(entry: Entry) -> bytes:
    return hashlib.sha256(entry.data or b"").digest()
