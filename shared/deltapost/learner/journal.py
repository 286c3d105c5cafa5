"""Journal: what this learner published, kept on its own disk until a record answers it.

An envelope and its payload are durable here before anything leaves the machine. So a learner killed at any
point posts the same bytes again, and a bucket or a Redis that lost them gets them again.

Layout of the directory: `FRAGMENT-VERSION.entry` (the envelope's frame and what became of it) and, while
unanswered, the payload under its SHA-256, `….payload`.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from deltapost.errors import MalformedMessage, StateUnavailable
from deltapost.events import events
from deltapost.learner.files import write_durably
from deltapost.serialization.documents import Document
from deltapost.serialization.messages import ContributionMessage, SignedMessage, read_message
from deltapost.serialization.verdicts import REDECIDED, Verdict

logger = events(__name__)

#: Answered entries kept per fragment, so that repeating a recent publish still finds its receipt.
KEPT_ANSWERED: Final = 16

_NAME: Final = re.compile(r"([0-9]{4})-([0-9]{10})\.entry")


class _Stored(Document):
    format: Literal[1] = 1
    frame: Annotated[bytes, Field(min_length=1)]
    verdict: Verdict | None
    final: bool


@dataclass(frozen=True)
class JournalEntry:
    """One published contribution.

    `verdict` is None until something is known; `answered` once a record says it (or its base's round closed
    without this envelope), which is for good. A verdict before that is the owner's advice.
    """

    signed: SignedMessage
    verdict: Verdict | None = None
    answered: bool = False

    @property
    def message(self) -> ContributionMessage:
        assert isinstance(self.signed.message, ContributionMessage)
        return self.signed.message

    @property
    def refused(self) -> bool:
        """Whether the owner advised a verdict that leaves the slot free: the base may be published anew.

        Not once a record answered: then the round is closed.
        """
        return not self.answered and self.verdict not in (None, "accepted", "conflict", *REDECIDED)


class Journal:
    """The journal of one learner in one run. Safe to use from several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        directory.mkdir(parents=True, exist_ok=True)
        self._entries: dict[tuple[int, int], JournalEntry] = {}
        for path in sorted(directory.iterdir()):
            if _NAME.fullmatch(path.name):
                self._read(path)
        wanted = {self._payload_path(entry) for entry in self.unanswered()}
        for path in [*directory.glob("*.payload"), *directory.glob(".*.tmp")]:
            if path not in wanted:  # of an answered entry, or left by a kill
                path.unlink()

    def _read(self, path: Path) -> None:
        try:
            stored = _Stored.from_bytes(path.read_bytes())
            entry = JournalEntry(read_message(stored.frame), stored.verdict, stored.final)
            key = (entry.message.fragment, entry.message.version)
            if not entry.answered:
                self.payload(entry)
        except (MalformedMessage, AssertionError, OSError, StateUnavailable) as error:
            logger.error("journal_entry_unreadable", extra={"file": path.name, "reason": str(error)})
            path.rename(path.with_suffix(".unreadable"))
            return
        self._entries[key] = entry

    def find(self, fragment: int, version: int) -> JournalEntry | None:
        with self._lock:
            return self._entries.get((fragment, version))

    def outstanding(self, fragment: int, version: int) -> bool:
        """Whether a contribution to this round is out: journalled, and neither answered nor refused."""
        entry = self.find(fragment, version)
        return entry is not None and not entry.answered and not entry.refused

    def unanswered(self) -> list[JournalEntry]:
        """Entries no record has answered, oldest base first."""
        with self._lock:
            found = [entry for entry in self._entries.values() if not entry.answered]
        return sorted(found, key=lambda entry: (entry.message.version, entry.message.fragment))

    def add(self, signed: SignedMessage, payload: bytes) -> JournalEntry:
        """Makes envelope and payload durable; a refused entry of the same base is replaced."""
        entry = JournalEntry(signed)
        with self._lock:
            before = self.find(entry.message.fragment, entry.message.version)
            write_durably(self._payload_path(entry), payload)
            self._write(entry)
            if before is not None and self._payload_path(before) != self._payload_path(entry):
                self._payload_path(before).unlink(missing_ok=True)
        return entry

    def payload(self, entry: JournalEntry) -> bytes:
        """The payload's bytes of an unanswered entry. Raises MalformedMessage, StateUnavailable."""
        try:
            data = self._payload_path(entry).read_bytes()
        except OSError as error:
            raise StateUnavailable(
                f"the payload of envelope {entry.signed.sha256.hex()[:16]}… cannot be read: {error.strerror}"
            ) from None
        if hashlib.sha256(data).digest() != entry.message.payload.sha256:
            raise MalformedMessage("its payload is damaged")
        return data

    def advise(self, envelope: bytes, verdict: Verdict) -> JournalEntry | None:
        """Notes the owner's advice about an unanswered envelope of this journal."""
        with self._lock:
            for entry in self.unanswered():
                if entry.signed.sha256 == envelope and entry.verdict != verdict:
                    advised = replace(entry, verdict=verdict)
                    self._write(advised)
                    return advised
        return None

    def settle(self, entry: JournalEntry, verdict: Verdict | None) -> None:
        """A record answered: keeps the frame and the verdict, lets the payload go.

        None: the base's round closed without this envelope, which therefore was never merged.
        """
        message = entry.message
        with self._lock:
            self._write(replace(entry, verdict=verdict, answered=True))
            self._payload_path(entry).unlink(missing_ok=True)
            answered = sorted(
                version
                for (fragment, version), kept in self._entries.items()
                if fragment == message.fragment and kept.answered
            )
            for version in answered[:-KEPT_ANSWERED]:
                del self._entries[message.fragment, version]
                self._entry_path(message.fragment, version).unlink(missing_ok=True)

    def _write(self, entry: JournalEntry) -> None:
        message = entry.message
        stored = _Stored(frame=entry.signed.frame, verdict=entry.verdict, final=entry.answered)
        write_durably(self._entry_path(message.fragment, message.version), stored.to_bytes())
        self._entries[message.fragment, message.version] = entry

    def _entry_path(self, fragment: int, version: int) -> Path:
        return self._directory / f"{fragment:04d}-{version:010d}.entry"

    def _payload_path(self, entry: JournalEntry) -> Path:
        message = entry.message
        name = f"{message.fragment:04d}-{message.version:010d}-{message.payload.sha256.hex()}.payload"
        return self._directory / name
