"""MembersReader: follows a run's members stream and keeps its learners' leases.

Every aggregator reads the whole stream from its start, in memory: who is live needs no transaction. The
ledger only learns when each learner was last seen.
"""

from __future__ import annotations

from collections import OrderedDict

from deltapost.errors import DeltapostError, MalformedMessage, SignatureRefused, StreamError
from deltapost.events import events
from deltapost.ledger import runs
from deltapost.serialization.messages import (
    AliveMessage,
    JoinMessage,
    LeaveMessage,
    MemberMessage,
    PassMessage,
    SignedMessage,
    read_message,
)
from deltapost.serialization.names import members_stream
from deltapost.streams import START, Entry, position_key
from deltapost_aggregator.context import RunContext

logger = events(__name__)

BATCH_ENTRIES = 512
#: Learners whose newest entry is kept because their key could not be had; the oldest go first.
MAX_DEFERRED = 1_024


class MembersReader:
    """Reads one run's members stream. `step` is called in a loop by one thread."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._services = context.services
        self.stream = members_stream(context.run)
        self._position = START
        self._read_at: float | None = None
        #: The run's highest head: the key that is in force there signs a member's messages.
        self._version = 0
        #: The newest entry of each learner whose key could not be had.
        self._deferred: OrderedDict[str, Entry] = OrderedDict()
        self._without_key: frozenset[str] = frozenset()

    @property
    def position(self) -> str:
        """Up to which entry the stream was read."""
        return self._position

    def step(self) -> int:
        """Reads what came; returns how many messages counted. Raises StreamError, LedgerUnavailable."""
        try:
            bounds = self._services.log.bounds(self.stream)
            if bounds is None or position_key(bounds.last_id) < position_key(self._position):
                self._position = START  # emptied: (session, counter) tell old messages from new
            entries = self._services.log.read(self.stream, self._position, limit=BATCH_ENTRIES)
        except StreamError:
            self._read_at = None  # what passes until the next success counts against nobody
            self._context.members_unknown()
            raise
        self._services.health.read_happened()
        now = self._services.monotonic()
        listened = now - self._read_at if self._read_at is not None else 0.0
        self._read_at = now
        self._version = self._context.keys.look()
        waiting = [(entry, self._parse(entry)) for entry in (*self._deferred.values(), *entries)]
        self._deferred = OrderedDict()
        signed = [(entry, found) for entry, found in waiting if found is not None]
        self._without_key = self._context.keys.without_key({_member(found).learner for _, found in signed})
        messages = [message for item in signed if (message := self._read(*item)) is not None]
        whole = len(entries) < BATCH_ENTRIES and not self._deferred
        counted = self._context.members(messages, listened, whole=whole)
        if entries:
            self._position = entries[-1].id
        runs.member_seen(self._services.ledger, counted)
        return len(counted)

    def _defer(self, learner: str, entry: Entry) -> None:
        self._deferred[learner] = entry
        if len(self._deferred) > MAX_DEFERRED:
            self._deferred.popitem(last=False)

    def _parse(self, entry: Entry) -> SignedMessage | None:
        try:
            signed = read_message(entry.data or b"")
            message = signed.message
            if not isinstance(message, JoinMessage | AliveMessage | LeaveMessage | PassMessage):
                raise MalformedMessage(f"a {message.kind} message is not a member's")
            if message.run != self._context.run:
                raise MalformedMessage(f"a message of run {message.run!r}")
        except MalformedMessage as error:
            self._refused(entry, error)
            return None
        return signed

    def _read(self, entry: Entry, signed: SignedMessage) -> MemberMessage | None:
        message = _member(signed)
        learner = message.learner
        if learner in self._deferred:  # asked in this step already
            self._defer(learner, entry)
            return None
        try:
            if learner in self._without_key:
                raise SignatureRefused(f"no key is registered for learner {learner!r}")
            refused = self._context.keys.refusal(signed, learner, self._version)
            if refused is not None:
                raise SignatureRefused(refused.detail)
        except SignatureRefused as error:
            self._refused(entry, error)
            return None
        except DeltapostError as error:  # its key cannot be had now: this entry waits, the others do not
            logger.warning(
                "member_message_deferred",
                extra={"run": self._context.run, "entry": entry.id, "reason": str(error)},
            )
            self._defer(learner, entry)
            return None
        return message

    def _refused(self, entry: Entry, error: DeltapostError) -> None:
        logger.info(
            "member_message_refused",
            extra={"run": self._context.run, "entry": entry.id, "reason": str(error)},
        )


def _member(signed: SignedMessage) -> MemberMessage:
    assert isinstance(signed.message, JoinMessage | AliveMessage | LeaveMessage | PassMessage)
    return signed.message
