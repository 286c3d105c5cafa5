"""Actors that take turns: of all threads exactly one runs, and the seed alone says which.

An actor is one thread of one simulated process. It runs until its next `turn`, where the scheduler picks who
goes on: the same seed, the same interleaving. Time is a number that moves when turns pass, or jumps when
everybody sleeps. A process can be stopped (SIGSTOP) for a while, or killed: its actors unwind at once, do
nothing more, and what they held in memory is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

#: Real seconds after which an actor that does not come back is a fault of the simulator itself.
HUNG_SECONDS = 60.0
#: Chance that an actor goes on after its turn, where others could: long runs of one are schedules too.
STICKY = 0.4
#: Simulated seconds between two looks at a lock that is held.
LOCK_SECONDS = 0.1


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test catches it."""


class Hung(Exception):
    """An actor blocked in real time: the code under test waits for something the simulator does not know."""


class Process:
    """One simulated process. Its monotonic clock has a start of its own."""

    def __init__(self, scheduler: Scheduler, name: str, offset: float) -> None:
        self.scheduler = scheduler
        self.name = name
        self.dead = False
        self.stopped_until = 0.0
        self.actors: list[Actor] = []
        #: Objects that it read, whole, and may remember.
        self.read: set[str] = set()
        self._offset = offset

    def spawn(self, name: str, body: Callable[[], object]) -> Actor:
        """Starts a thread of this process."""
        self.actors.append(Actor(self, f"{self.name} {name}", body))
        self.scheduler.actors.append(self.actors[-1])
        return self.actors[-1]

    def kill(self) -> None:
        self.dead = True

    def stop(self, seconds: float) -> None:
        self.stopped_until = self.scheduler.now + seconds

    def proceed(self) -> None:
        self.stopped_until = 0.0

    @property
    def ended(self) -> bool:
        return all(actor.ended for actor in self.actors)

    def monotonic(self) -> float:
        return self.scheduler.now + self._offset

    def sleep(self, seconds: float) -> None:
        self.scheduler.turn("", seconds)


class Lock:
    """A lock between threads of one process, which they hold over calls: who waits takes its turns."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._held = False

    def acquire(self, timeout: float = float("inf")) -> bool:
        deadline = self._process.monotonic() + timeout
        while self._held:
            left = deadline - self._process.monotonic()
            if left <= 0:
                return False
            self._process.sleep(min(left, LOCK_SECONDS))
        self._held = True
        return True

    def release(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _gate() -> threading.Lock:
    """A closed gate: `release` lets one through `acquire`. Bare, as it is passed at each turn."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Actor:
    """One thread that only runs when its gate is open."""

    def __init__(self, process: Process, name: str, body: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.wake_at = 0.0
        #: The streams whose next entry wakes this actor up.
        self.listening: frozenset[str] = frozenset()
        self.ended = False
        self.gate = _gate()
        self._body = body
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """It need not wait any longer."""
        self.listening = frozenset()
        self.wake_at = self.process.scheduler.now

    def _run(self) -> None:
        self.gate.acquire()
        scheduler = self.process.scheduler
        try:
            if not self.process.dead:
                self._body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  what would have killed the process ends the seed
            scheduler.crashed(self, error)
        self.ended = True
        scheduler.hand_over()


class Scheduler:
    """Decides who runs. `after_turn` is called before each decision; it may end the simulation."""

    def __init__(
        self, chance: Random, *, after_turn: Callable[[], bool], trace: Callable[[str], None]
    ) -> None:
        self.now = 1_000.0
        self.turns = 0
        self.actors: list[Actor] = []
        self.crash: tuple[str, BaseException] | None = None
        self._chance = chance
        self._after_turn = after_turn
        self._trace = trace
        self._over = False
        self._main = _gate()
        self.current: Actor | None = None

    def process(self, name: str) -> Process:
        return Process(self, name, self._chance.uniform(0, 1e6))

    def run(self) -> None:
        """Runs the actors until `after_turn` says so or none is left. Every one has unwound then."""
        self.hand_over()
        self._wait()
        self._over = True
        for actor in self.actors:
            actor.process.dead = True
        for actor in self.actors:
            if not actor.ended:
                self.current = actor
                actor.gate.release()
                self._wait()

    def _wait(self) -> None:
        before = -1
        while not self._main.acquire(timeout=HUNG_SECONDS):
            if self.turns == before:
                raise Hung(f"{self.current.name if self.current else '?'} does not come back")
            before = self.turns

    def crashed(self, actor: Actor, error: BaseException) -> None:
        """An actor ended by an exception that its process would have died of."""
        if self.crash is None:
            self.crash = (actor.name, error)

    def turn(self, what: str, seconds: float = 0.0, *, listening: frozenset[str] = frozenset()) -> None:
        """The current actor did, or is about to do, `what`: others may run now, for `seconds` at least."""
        actor = self.current
        assert actor is not None
        if actor.process.dead:
            raise Killed
        if what:
            self._trace(f"{actor.name}: {what}")
        actor.wake_at = self.now + seconds
        actor.listening = listening
        following = self._choose(actor)
        if following is not actor:
            self._go(following)
            actor.gate.acquire()
        if actor.process.dead:
            raise Killed

    def hand_over(self) -> None:
        """Lets the next one run: the present one has ended."""
        self._go(None if self._over else self._choose(None))

    def wake(self, stream: str) -> None:
        """Whoever waits for mail in the stream need not wait longer."""
        for actor in self.actors:
            if stream in actor.listening:
                actor.wake()

    def _go(self, following: Actor | None) -> None:
        self.current = following
        (self._main if following is None else following.gate).release()

    def _choose(self, present: Actor | None) -> Actor | None:
        self.turns += 1
        self.now += self._chance.random() * 0.004
        if self.crash is not None or self._after_turn():
            return None
        self.actors = [actor for actor in self.actors if not actor.ended]
        for actor in self.actors:
            if actor.process.dead:
                return actor
        ready = self._ready()
        if not ready:
            return None
        if present in ready and self._chance.random() < STICKY:
            return present
        return ready[self._chance.randrange(len(ready))]

    def _ready(self) -> list[Actor]:
        due = [(max(actor.wake_at, actor.process.stopped_until), actor) for actor in self.actors]
        if not due:
            return []
        earliest = min(at for at, _ in due)
        self.now = max(self.now, earliest)
        return [actor for at, actor in due if at <= self.now]
