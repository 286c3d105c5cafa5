"""Pool: a few threads serve many tasks in turn; a task that waits holds none.

A task does one step at a time and says what it waits for: nothing, mail on a stream, or some seconds. Ready
tasks are served in the order in which they became so; a failing one is tried again with back-off and hurts
only itself. `Doorbell` is the one reader of all the streams that tasks wait on.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from deltapost.errors import DeltapostError
from deltapost.events import events
from deltapost.streams import MessageLog
from deltapost_aggregator.context import Health

logger = events(__name__)

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0

#: Longest read of the doorbell while tasks run: for so long it may not know what they wait for next.
BUSY_BELL_SECONDS = 0.01


@dataclass(frozen=True)
class Mail:
    """Wait for an entry of `stream` after `position`, at most `seconds`."""

    stream: str
    position: str
    seconds: float


#: What a step leads to: `again` at the next turn, wait, or `done` for good.
Next: TypeAlias = Literal["again", "done"] | Mail


class Task(Protocol):
    """Something that is served step by step; one step at a time, by changing threads."""

    name: str

    def step(self) -> Next:
        """The next step. A DeltapostError is waited out."""


class _Seat:
    """Where a task stands: ready, running, waiting until `due` (and perhaps for `mail`), or gone."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.state: Literal["ready", "running", "waiting", "gone"] = "ready"
        self.mail: Mail | None = None
        self.due = 0.0
        self.busy_since = time.monotonic()
        self.woken = False
        self.pause = FIRST_PAUSE_SECONDS


class Pool:
    """Serves its tasks with `threads` threads, once they call `serve`."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._changed = threading.Condition()
        self._seats: dict[Task, _Seat] = {}
        self._ready: deque[_Seat] = deque()
        self._timers: list[tuple[float, int, _Seat]] = []
        self._numbers = itertools.count()
        self._stopped = False

    def add(self, task: Task) -> None:
        """Serves the task from now on."""
        with self._changed:
            seat = self._seats[task] = _Seat(task)
            self._ready.append(seat)
            self._changed.notify_all()

    def wake(self, tasks: Iterable[Task]) -> None:
        """Has each task stepped soon, whatever it waits for; one that pauses after a failure pauses on."""
        with self._changed:
            for task in tasks:
                self._wake(self._seats.get(task))
            self._changed.notify_all()

    def ring(self, streams: Iterable[str]) -> None:
        """Wakes whoever waits for mail on these streams."""
        named = set(streams)
        with self._changed:
            for seat in self._seats.values():
                if seat.state == "waiting" and seat.mail is not None and seat.mail.stream in named:
                    self._wake(seat)
            self._changed.notify_all()

    def busy_for(self, task: Task) -> float:
        """Seconds for which the task has been ready or in one step; 0 while it waits."""
        with self._changed:
            seat = self._seats.get(task)
            if seat is None or seat.state == "waiting":
                return 0.0
            return time.monotonic() - seat.busy_since

    def awaited(self, seconds: float) -> tuple[Mapping[str, str], bool]:
        """The streams that mail is awaited on, with positions, and whether every task waits for mail.

        Waits at most `seconds` until there is one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or any(self._mail()), timeout=seconds)
            calm = all(seat.state == "waiting" and seat.mail is not None for seat in self._seats.values())
            return {mail.stream: mail.position for mail in self._mail()}, calm

    def _mail(self) -> Iterable[Mail]:
        return (
            seat.mail for seat in self._seats.values() if seat.state == "waiting" and seat.mail is not None
        )

    def stop(self) -> None:
        """Lets `serve` return once the steps in progress are done."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def serve(self) -> None:
        """Steps tasks until `stop`: what each of the pool's threads does."""
        while True:
            with self._changed:
                seat = self._next()
                if seat is None:
                    return
            outcome = self._step(seat)
            with self._changed:
                self._settle(seat, outcome)
                self._changed.notify_all()

    def _next(self) -> _Seat | None:
        """The seat whose turn it is, now running; None once stopped. Waits for one."""
        while not self._stopped:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                due, _, seat = heapq.heappop(self._timers)
                if seat.state == "waiting" and seat.due == due:
                    self._make_ready(seat)
            if self._ready:
                seat = self._ready.popleft()
                seat.state = "running"
                return seat
            self._changed.wait(self._timers[0][0] - now if self._timers else None)
        return None

    def _step(self, seat: _Seat) -> Next | float:
        """What the step led to; seconds to pause for when it failed."""
        name = seat.task.name
        try:
            outcome = seat.task.step()
        except DeltapostError as error:
            self._health.problem(name, str(error))
            level = logging.WARNING if error.retryable else logging.ERROR
            logger.log(level, "step_failed", extra={"loop": name, "code": error.code, "reason": str(error)})
            pause = seat.pause if error.retryable else LONGEST_PAUSE_SECONDS
        except Exception as error:
            self._health.problem(name, f"unexpected {type(error).__name__}: see the log")
            logger.exception("step_crashed", extra={"loop": name})
            pause = LONGEST_PAUSE_SECONDS
        else:
            self._health.fine(name)
            seat.pause = FIRST_PAUSE_SECONDS
            return outcome
        seat.pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return pause

    def _settle(self, seat: _Seat, outcome: Next | float) -> None:
        seat.mail = None
        if outcome == "done":
            seat.state = "gone"
            self._seats.pop(seat.task, None)
        elif outcome == "again":
            self._make_ready(seat)
        elif isinstance(outcome, Mail):
            seat.mail = outcome
            self._wait(seat, outcome.seconds)
            if seat.woken:
                self._make_ready(seat)
        else:
            assert isinstance(outcome, float)
            self._wait(seat, outcome)
        seat.woken = False

    def _wait(self, seat: _Seat, seconds: float) -> None:
        seat.state, seat.due = "waiting", time.monotonic() + seconds
        heapq.heappush(self._timers, (seat.due, next(self._numbers), seat))

    def _wake(self, seat: _Seat | None) -> None:
        if seat is None:
            return
        if seat.state == "running":
            seat.woken = True
        elif seat.state == "waiting" and seat.mail is not None:
            self._make_ready(seat)

    def _make_ready(self, seat: _Seat) -> None:
        seat.state, seat.busy_since = "ready", time.monotonic()
        self._ready.append(seat)


class Doorbell:
    """Reads all the streams that a pool's tasks wait on at once, and wakes the tasks that got mail."""

    def __init__(self, pool: Pool, log: MessageLog, health: Health) -> None:
        self._pool = pool
        self._log = log
        self._health = health

    def step(self, wait_seconds: float) -> None:
        """One read. Raises StreamError.

        While a task runs, what it will wait for is not known yet, so reads are short; a task that was not
        in the read loses no mail by that, only so much time.
        """
        awaited, calm = self._pool.awaited(wait_seconds)
        if not awaited:
            return
        self._pool.ring(
            self._log.ready(
                awaited, wait_seconds=wait_seconds if calm else min(BUSY_BELL_SECONDS, wait_seconds)
            )
        )
        self._health.read_happened()
