"""What the members stream says about one learner, for its own next session."""

from __future__ import annotations

from deltapost.errors import MalformedMessage
from deltapost.serialization.messages import (
    AliveMessage,
    JoinMessage,
    LeaveMessage,
    PassMessage,
    read_message,
)
from deltapost.serialization.names import members_stream
from deltapost.streams import START, MessageLog

BATCH_ENTRIES = 1_000
#: Numbers from here on are a stranger's: counting up to it takes longer than any run.
HIGHEST_SESSION = 2**52


def largest_session(log: MessageLog, run: str, learner: str) -> int:
    """The largest session number seen of that id; 0 when there is none.

    Signatures are not checked: a stranger can only make the next number larger.
    """
    largest, position = 0, START
    while True:
        entries = log.read(members_stream(run), position, limit=BATCH_ENTRIES)
        for entry in entries:
            position = entry.id
            try:
                message = read_message(entry.data or b"").message
            except MalformedMessage:
                continue
            if not isinstance(message, JoinMessage | AliveMessage | LeaveMessage | PassMessage):
                continue
            if (message.run, message.learner) == (run, learner) and message.session < HIGHEST_SESSION:
                largest = max(largest, message.session)
        if len(entries) < BATCH_ENTRIES:
            return largest
