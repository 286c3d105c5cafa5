"""Aggregators: the real discovery, members readers and fragment workers of several processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from deltapost.adapters.native import NativeBackend
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import DeltapostError, ForkedHistory
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.discovery import Discovery
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.settings import AggregatorSettings
from deltapost_aggregator.worker import FragmentWorker
from simulator.scheduling import Process

if TYPE_CHECKING:
    from simulator.world import World

POLL_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0


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
        ),
        store=world.store,
        log=world.log,
        ledger=world.ledger,
        key=world.aggregator_key,
        backend=NativeBackend(),
        reach=partial(world.reach, process),
        monotonic=process.monotonic,
        sleep=process.sleep,
    )

    def serve(plan: RunPlan) -> None:
        context = RunContext(services, plan)
        members = MembersReader(context)
        process.spawn("members", lambda: _loop(world, process, partial(members.step, POLL_SECONDS)))
        for fragment in range(len(plan.fragments)):
            worker = FragmentWorker(context, fragment)
            step = partial(worker.step, POLL_SECONDS)
            process.spawn(f"fragment {fragment}", partial(_loop, world, process, step))

    discovery = Discovery(services, serve)
    process.spawn("runs", lambda: _loop(world, process, partial(discovery.step, POLL_SECONDS)))


def _loop(world: World, process: Process, step: Callable[[], object]) -> None:
    """The service's loop: whatever deltapost raises is waited out, anything else is a fault."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            step()
            pause = FIRST_PAUSE_SECONDS
        except DeltapostError as error:
            if isinstance(error, ForkedHistory):  # other HistoryErrors pass once the ledger is whole again
                world.fail(f"{process.name} refuses history: {error}")
            world.note(f"{process.name}: {type(error).__name__}: {error}")
            process.sleep(pause if error.retryable else LONGEST_PAUSE_SECONDS)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
