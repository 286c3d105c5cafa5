"""Aggregators: the real discovery, fleet, housekeeping, members readers and fragment workers of each.

Of a pool only the threads are replaced: each of its tasks is an actor, which waits for its own mail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from deltapost.adapters.native import NativeBackend
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import DeltapostError, ForkedHistory, HistoryError, SignatureRefused, StreamError
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.discovery import Discovery
from deltapost_aggregator.fleet import Fleet
from deltapost_aggregator.housekeeping import Housekeeping
from deltapost_aggregator.pool import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Mail, Task
from deltapost_aggregator.service import MembersTask
from deltapost_aggregator.settings import AggregatorSettings
from simulator.scheduling import Actor, Lock, Process

if TYPE_CHECKING:
    from simulator.world import World

POLL_SECONDS = 5.0


def start_aggregator(world: World, process: Process, name: str) -> None:
    """The threads of `deltapost aggregator`, as its service starts them."""
    services = Services(
        settings=AggregatorSettings.read(
            redis_url="memory://",
            store="memory://",
            ledger_url="sqlite:///unused",
            signing_key_file="unused",
            aggregator_name=name,
            poll_seconds=POLL_SECONDS,
            payload_cache_bytes=world.scenario.cache_bytes,
            transfer_threads=1,
            garbage_seconds=world.scenario.garbage_seconds or 1.0,
            retain=world.scenario.retain,
        ),
        store=world.store,
        log=world.log,
        ledger=world.ledger,
        key=world.aggregator_key,
        backend=NativeBackend(),
        reach=partial(world.reach, process),
        monotonic=process.monotonic,
        sleep=process.sleep,
        suspect_read=Lock(process),  # type: ignore[arg-type]
    )
    pool = _Pool(world, process)
    fleet = Fleet(services, pool)  # type: ignore[arg-type]
    housekeeping = Housekeeping(services)

    def serve(plan: RunPlan) -> None:
        context = RunContext(services, plan)
        pool.add(MembersTask(context, fleet, pool))  # type: ignore[arg-type]
        fleet.serve(context)
        housekeeping.serve(context)

    discovery = Discovery(services, serve)
    loops = {"runs": partial(discovery.step, POLL_SECONDS), "fleet": partial(fleet.step, POLL_SECONDS)}
    if world.scenario.garbage_seconds is not None:
        loops["housekeeping"] = partial(housekeeping.step, POLL_SECONDS)
    for part, step in loops.items():
        process.spawn(part, partial(_loop, world, process, step))


def _loop(world: World, process: Process, step: Callable[[], object]) -> None:
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            step()
            pause = FIRST_PAUSE_SECONDS
        except DeltapostError as error:
            pause = _wait_out(world, process, error, pause)


def _wait_out(world: World, process: Process, error: DeltapostError, pause: float) -> float:
    """Whatever deltapost raises is waited out, as the service does, unless it says that history is broken."""
    # A record that cannot be checked may have lost an input: that passes once it is restored.
    lost_inputs = isinstance(error, HistoryError) and bool(world.lost)
    # So does a restored ledger's ignorance of who asked for an end that is there: the operator asks again.
    forgotten = world.history.end_is_wanted and "an end that nobody asked for" in str(error)
    passes = lost_inputs or forgotten
    if isinstance(error, ForkedHistory | SignatureRefused | HistoryError) and not passes:
        world.fail(f"{process.name} refuses history: {error}")
    world.note(f"{process.name}: {type(error).__name__}: {error}")
    process.sleep(pause if error.retryable else LONGEST_PAUSE_SECONDS)
    return min(2 * pause, LONGEST_PAUSE_SECONDS)


class _Pool:
    """`Pool` and `Doorbell` of a simulated process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._actors: dict[Task, Actor] = {}
        self._busy_since: dict[Task, float] = {}
        self._woken: set[Task] = set()

    def add(self, task: Task) -> None:
        self._actors[task] = self._process.spawn(task.name, lambda: self._serve(task))

    def wake(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            if task in self._busy_since:
                self._woken.add(task)
            elif task in self._actors:
                self._actors[task].wake()

    def busy_for(self, task: Task) -> float:
        since = self._busy_since.get(task)
        return 0.0 if since is None else self._process.monotonic() - since

    def _serve(self, task: Task) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._busy_since[task] = self._process.monotonic()
            try:
                outcome = task.step()
                pause = FIRST_PAUSE_SECONDS
            except DeltapostError as error:
                pause = _wait_out(self._world, self._process, error, pause)
                continue
            if outcome == "done":
                del self._actors[task], self._busy_since[task]
                return
            if isinstance(outcome, Mail) and task not in self._woken:
                del self._busy_since[task]
                self._await(outcome)
            self._woken.discard(task)

    def _await(self, mail: Mail) -> None:
        try:
            self._world.log.ready({mail.stream: mail.position}, wait_seconds=mail.seconds)
        except StreamError:
            self._process.sleep(mail.seconds)
