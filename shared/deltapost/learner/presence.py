"""Presence: the learner's messages to the members stream, from a thread that nothing else can hold up.

A learner counts as live while these arrive. (session, counter) only grows, so a replayed message renews
nothing.
"""

from __future__ import annotations

import threading
from typing import Any

from deltapost.errors import DeltapostError
from deltapost.events import events
from deltapost.limits import MAX_MEMBERS_ENTRIES
from deltapost.serialization.messages import (
    AliveMessage,
    JoinMessage,
    LeaveMessage,
    MemberMessage,
    PassMessage,
    sign_message,
)
from deltapost.serialization.names import members_stream
from deltapost.serialization.signing import SigningKey
from deltapost.streams import MessageLog

logger = events(__name__)

#: Seconds until an `alive` that could not be posted is tried again.
RETRY_SECONDS = 1.0


class Presence:
    """One session of one learner. `local_step` and `waiting` are what the next `alive` says."""

    def __init__(
        self, log: MessageLog, key: SigningKey, run: str, learner: str, session: int, alive_seconds: float
    ) -> None:
        self._log = log
        self._key = key
        self._run = run
        self._learner = learner
        self.session = session
        self._alive_seconds = alive_seconds
        self.local_step = 0
        self.waiting = False
        self._lock = threading.Lock()
        self._counter = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"deltapost presence {learner}", daemon=True)

    def start(self) -> None:
        """Posts `join` and keeps saying `alive`. Raises StreamUnavailable."""
        self._say(JoinMessage(run=self._run, learner=self._learner, session=self.session, counter=0))
        self._thread.start()

    def stop(self) -> None:
        """Says nothing any more: as when the process dies."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def leave(self) -> None:
        """Ends the session in order: nobody need wait for this learner. Raises StreamUnavailable."""
        self.stop()
        self._say(LeaveMessage(**self._next()))

    def pass_round(self, fragment: int, version: int) -> None:
        """Says that nothing will come from this learner for the round. Raises StreamUnavailable."""
        self._say(PassMessage(**self._next(), fragment=fragment, version=version))

    def _next(self) -> dict[str, Any]:
        with self._lock:
            self._counter += 1
            counter = self._counter
        return {"run": self._run, "learner": self._learner, "session": self.session, "counter": counter}

    def _say(self, message: MemberMessage) -> None:
        frame = sign_message(message, self._key).frame
        self._log.append(members_stream(self._run), frame, max_length=MAX_MEMBERS_ENTRIES)

    def _loop(self) -> None:
        while not self._stop.is_set():
            pause = self._alive_seconds
            try:
                self._say(AliveMessage(**self._next(), local_step=self.local_step, waiting=self.waiting))
            except DeltapostError as error:
                logger.warning(
                    "alive_not_posted",
                    extra={"run": self._run, "learner": self._learner, "reason": str(error)},
                )
                pause = min(RETRY_SECONDS, pause)
            except Exception:  # whatever it is: a learner that says nothing is not live
                logger.exception("alive_crashed", extra={"run": self._run, "learner": self._learner})
                pause = min(RETRY_SECONDS, pause)
            self._stop.wait(pause)
