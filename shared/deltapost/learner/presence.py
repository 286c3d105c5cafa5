"""Presence: the learner's messages to the members stream, from a thread that nothing else can hold up.

A learner counts as live while these arrive. (session, counter) only grows, so a replayed message renews
nothing. Redis is a doorbell: a `pass` may be lost like anything there, so it is said again with each `alive`
until the round that it passed is closed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from deltapost.errors import DeltapostError, StreamError
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
#: Passes said again with one `alive`: with more fragments than these, in turn.
MAX_PASSES_PER_ALIVE = 16


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
        #: The round last passed of each fragment, until its record is here; the one said longest ago first.
        self._passed: OrderedDict[int, int] = OrderedDict()
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
        """Says that nothing will come from this learner for the round, until `closed` is told.

        A stream that does not answer now hears it with a later `alive`.
        """
        with self._lock:
            self._passed[fragment] = version
            self._passed.move_to_end(fragment)
        try:
            self._say(PassMessage(**self._next(), fragment=fragment, version=version))
        except StreamError as error:
            logger.warning(
                "pass_delayed",
                extra={
                    "run": self._run,
                    "learner": self._learner,
                    "fragment": fragment,
                    "reason": str(error),
                },
            )

    def closed(self, fragment: int, head: int) -> None:
        """The fragment has reached the version: a pass of a round before it is done with."""
        with self._lock:
            if self._passed.get(fragment, head) < head:
                del self._passed[fragment]

    def _pass_again(self) -> None:
        """Says the passes of open rounds again, those first that were said longest ago."""
        with self._lock:
            due = list(self._passed.items())[:MAX_PASSES_PER_ALIVE]
            for fragment, _ in due:
                self._passed.move_to_end(fragment)
        for fragment, version in due:
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
                self._pass_again()
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
