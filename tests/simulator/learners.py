"""Learners: the real `join` and what it starts, on the scheduler's threads, clock and waiting.

Only what a process takes from its machine is replaced: threads, events, the clock, fsync and the directory
lock. Journal and history lie in a directory, so a killed learner finds there what it made durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import deltapost
from deltapost.errors import DeltapostError, HistoryError, RunFinished, SignatureRefused
from deltapost.learner.courier import Courier
from deltapost.learner.inbox import Inbox
from deltapost.learner.presence import Presence
from deltapost.learner.session import Run
from fixtures.pipeline import RUN, arrays
from simulator.finishing import over_for
from simulator.scheduling import Killed, Lock, Process

if TYPE_CHECKING:
    from simulator.world import World

POLL_SECONDS = 4.0
LOOK_SECONDS = 0.5


class _Event:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, seconds: float) -> bool:
        if not self._set:
            self._process.sleep(seconds)
        return self._set


class _Thread:
    def __init__(self, process: Process, name: str, target: Callable[[], None]) -> None:
        self._process = process
        self._name = name
        self._target = target
        self._ended = True

    def start(self) -> None:
        self._ended = False
        self._process.spawn(self._name, self._run)

    def _run(self) -> None:
        self._target()
        self._ended = True

    def is_alive(self) -> bool:
        return not self._ended

    def join(self, timeout: float) -> None:
        deadline = self._process.monotonic() + timeout
        while not self._ended and self._process.monotonic() < deadline:
            self._process.sleep(LOOK_SECONDS)


class _Inbox(Inbox):
    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def wait(self, there: Callable[[], bool], deadline: float) -> bool:
        while True:
            self.check()
            if there():
                return True
            if self._process.monotonic() >= deadline:
                return False
            self._process.sleep(LOOK_SECONDS)


class _Lock:
    """Two processes of one learner never run at once here."""

    def __init__(self, _directory: object, *, what: str) -> None:
        self._what = what

    def release(self) -> None:
        """Nothing was locked."""


@contextmanager
def machine(world: World) -> Iterator[None]:
    """While this lasts, the code runs on the simulated machine of whichever process is current."""

    def process() -> Process:
        current = world.scheduler.current
        assert current is not None
        return current.process

    class _Courier(Courier):
        def __init__(self, **parts: Any) -> None:
            here = process()
            super().__init__(**parts, monotonic=here.monotonic)
            self._stop = _Event(here)  # type: ignore[assignment]
            self._thread = _Thread(here, "courier", self._loop)  # type: ignore[assignment]

        def step(self, wait_seconds: float) -> None:
            try:
                super().step(wait_seconds)
            except (HistoryError, SignatureRefused) as error:
                world.fail(f"{self._learner} refuses history: {error}")
                raise
            except DeltapostError:
                raise
            except Exception as error:
                world.fail(f"the courier of {self._learner} crashed: {error!r}")
                raise
            world.learner_stepped(self._learner, self._follower, self._journal)

    class _Presence(Presence):
        def __init__(self, *parts: Any, **named: Any) -> None:
            super().__init__(*parts, **named)
            here = process()
            self._stop = _Event(here)  # type: ignore[assignment]
            self._thread = _Thread(here, "presence", self._loop)  # type: ignore[assignment]

    chance = Random(f"tokens {world.scenario.seed}")
    clock = SimpleNamespace(monotonic=lambda: process().monotonic())
    threads = SimpleNamespace(Lock=lambda: Lock(process()), Event=lambda: _Event(process()))
    replaced = {
        "deltapost.learner.joining.Courier": _Courier,
        "deltapost.learner.joining.Presence": _Presence,
        "deltapost.learner.joining.Inbox": lambda: _Inbox(process()),
        "deltapost.learner.joining.DirectoryLock": _Lock,
        "deltapost.learner.joining.fail_from_environment": lambda _: (
            lambda point: world.reach(process(), point)
        ),
        "deltapost.learner.session.time": clock,
        "deltapost_aggregator.fleet.threading": threads,
        "deltapost_aggregator.keyring.threading": threads,
        "os.fsync": lambda _descriptor: None,
        "secrets.token_hex": lambda count: chance.randbytes(count).hex(),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        yield


def start_learner(world: World, process: Process, learner: str) -> None:
    """One learner's process: joins, then trains, publishes and follows until it is told to leave."""
    process.spawn("training", lambda: _train(world, process, learner))


def _train(world: World, process: Process, learner: str) -> None:
    chance = Random(f"learner {learner} {world.scenario.seed} {world.scheduler.turns}")
    noise = np.random.default_rng(chance.randrange(2**32))
    model = arrays(0)
    try:
        run = deltapost.join(
            RUN,
            model,
            learner=learner,
            store=world.store,
            redis_url=world.log,
            state_dir=world.state_directory(learner),
            signing_key_file=str(world.key_file(learner)),
            poll_seconds=POLL_SECONDS,
        )
    except RunFinished:
        over_for(world, learner, None)
        return
    except DeltapostError as error:
        if isinstance(error, HistoryError | SignatureRefused):
            world.fail(f"{learner} cannot join: {error}")
        world.note(f"{learner} cannot join: {error}")
        process.kill()
        raise Killed from error
    world.joined(learner, run)
    over = False
    while not over and not world.leaves(process):
        process.sleep(world.scenario.step_seconds * chance.uniform(0.5, 1.5))
        _step(world, process, run, model, chance, noise)
        over = run.finished and not any(map(run._inbox.has, range(len(run.versions))))
    run.leave()
    if over:
        over_for(world, learner, run.versions)


def _step(
    world: World,
    process: Process,
    run: Run,
    model: dict[str, Any],
    chance: Random,
    noise: np.random.Generator,
) -> None:
    for array in model.values():
        array -= 0.1 * noise.standard_normal(array.shape, dtype=np.float32)
    run.count_step(tokens=chance.randrange(1, 100), seconds=world.scenario.step_seconds)
    try:
        if not world.healed and chance.random() < 0.03:
            fragment = chance.randrange(len(run.versions))
            run.pass_round(fragment, run.version(fragment))
        run.publish_due(loss=1.0)
        world.aligned(run.learner, run, run.align())
    except HistoryError as error:
        world.fail(f"{run.learner} refuses history: {error}")
        raise Killed from error
    except DeltapostError as error:
        world.note(f"{run.learner}: {error}")
        if error.retryable:
            return
        # A session's first upload that somebody altered ends it in words; whoever runs it starts it again.
        if not any(repr(key) in str(error) for key in world.altered):
            world.fail(f"{run.learner} cannot train on: {error!r}")
        process.kill()
        raise Killed from error
