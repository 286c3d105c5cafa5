"""MembersReader: follows a run's members stream and keeps its learners' leases.

Every aggregator reads the whole stream from its start, in memory: who is live needs no transaction. The
ledger only learns when each learner was last seen.
"""

from __future__ import annotations

import logging

from deltapost.errors import MalformedMessage, SignatureRefused, StreamUnavailable
from deltapost.ledger import runs
from deltapost.serialization.messages import (
    AliveMessage,
    JoinMessage,
    LeaveMessage,
    MemberMessage,
    PassMessage,
    read_message,
)
from deltapost.serialization.names import members_stream
from deltapost.streams import START, Entry, position_key
from deltapost_aggregator.context import RunContext

logger = logging.getLogger(__name__)

BATCH_ENTRIES = 512


class MembersReader:
    """Reads one run's members stream. `step` is called in a loop by one thread."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._services = context.services
        self._stream = members_stream(context.run)
        self._position = START
        self._read_at: float | None = None

    def step(self, wait_seconds: float) -> int:
        """Reads what came; returns how many messages counted. Raises StreamUnavailable, StoreUnavailable."""
        try:
            bounds = self._services.log.bounds(self._stream)
            if bounds is None or position_key(bounds.last_id) < position_key(self._position):
                self._position = (
                    START  # the stream was emptied: (session, counter) tell old messages from new
                )
            entries = self._services.log.read(
                self._stream, self._position, limit=BATCH_ENTRIES, wait_seconds=wait_seconds
            )
        except StreamUnavailable:
            self._read_at = None  # what passes until the next success counts against nobody
            raise
        self._services.health.read_happened()
        now = self._services.monotonic()
        lock, liveness = self._context.liveness()
        if self._read_at is not None:
            with lock:
                liveness.listened(now - self._read_at)
        self._read_at = now
        counted: list[MemberMessage] = []
        for entry in entries:
            message = self._read(entry)
            if message is not None:
                with lock:
                    if liveness.observe(message):
                        counted.append(message)
            self._position = entry.id
        runs.member_seen(self._services.ledger, counted)
        if len(entries) < BATCH_ENTRIES:
            self._context.members_read = True
        return len(counted)

    def _read(self, entry: Entry) -> MemberMessage | None:
        try:
            signed = read_message(entry.data or b"")
            message = signed.message
            if not isinstance(message, JoinMessage | AliveMessage | LeaveMessage | PassMessage):
                raise MalformedMessage(f"a {message.kind} message is not a member's")
            if message.run != self._context.run:
                raise MalformedMessage(f"a message of run {message.run!r}")
            key = self._context.public_key(message.learner)
            if key is None:
                raise SignatureRefused(f"no key is registered for learner {message.learner!r}")
            signed.verify(key, who=f"learner {message.learner}")
        except (MalformedMessage, SignatureRefused) as error:
            logger.info(
                "member_message_refused",
                extra={"run": self._context.run, "entry": entry.id, "reason": str(error)},
            )
            return None
        return message
