"""AggregatorService: the threads of an aggregator, and what keeps them going.

However many runs and fragments there are, the threads are those of the pool and one each for runs, fleet,
doorbell, housekeeping and health. A retryable failure of store, stream or ledger is waited out with back-off
and shows in `/readyz`; any other error of a fragment is logged, shown and tried again more slowly: one bad
fragment or run never stops the others.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from deltapost.adapters.native import NativeBackend
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import DeltapostError
from deltapost.events import events
from deltapost.ledger.engine import open_ledger
from deltapost.points import fail_from_environment
from deltapost.serialization.signing import SigningKey
from deltapost.settings import reveal
from deltapost.stores import open_store
from deltapost.stores.probe import probe
from deltapost.streams import open_log
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.discovery import Discovery
from deltapost_aggregator.eviction import EvictionCheck
from deltapost_aggregator.fleet import Fleet
from deltapost_aggregator.health import HealthServer
from deltapost_aggregator.housekeeping import Housekeeping
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.pool import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Doorbell, Mail, Next, Pool
from deltapost_aggregator.settings import AggregatorSettings
from deltapost_aggregator.spool import Spool

logger = events(__name__)


class MembersTask:
    """A run's members stream, as a task of the pool: what it learns may let rounds close at once."""

    def __init__(self, context: RunContext, fleet: Fleet, pool: Pool) -> None:
        self.name = f"run {context.run} members"
        self._context = context
        self._reader = MembersReader(context)
        self._fleet = fleet
        self._pool = pool

    def step(self) -> Next:
        if self._context.finished:
            return "done"
        before = self._context.changes
        counted = self._reader.step()
        if self._context.changes != before:
            self._pool.wake(self._fleet.holdings(self._context.run))
        if counted:
            return "again"
        seconds = self._context.services.settings.poll_seconds
        return Mail(self._reader.stream, self._reader.position, seconds)


class AggregatorService:
    """Serves every allowed run until `stop`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._stop = threading.Event()
        self._pool = Pool(services.health)
        self._fleet = Fleet(services, self._pool)
        self._doorbell = Doorbell(self._pool, services.log, services.health)
        self._housekeeping = Housekeeping(services)
        self._discovery = Discovery(services, self._serve)
        self._eviction = EvictionCheck(services)

    def run(self) -> None:
        """Blocks until `stop` is called; then waits for the steps in progress and gives the leases back.

        Raises ConfigurationError when the health endpoints cannot listen where they are told to.
        """
        settings = self.services.settings
        server = None
        if settings.aggregator_health_port:
            server = HealthServer(
                self.services.health, settings.aggregator_health_host, settings.aggregator_health_port
            )
            server.start()
        logger.info(
            "aggregator_started",
            extra={"owner": settings.aggregator_name, "key": self.services.key.public.hex()},
        )
        # First of all: a store that lets two create one key, or hides what is missing, forks runs.
        self._loop("store", lambda: probe(self.services.store), once=True)
        wait = min(settings.poll_seconds, settings.lease_seconds / 3)
        loops = [
            threading.Thread(target=self._loop, args=(name, step), name=name, daemon=True)
            for name, step in (
                ("fleet", partial(self._fleet.step, wait)),
                ("streams", partial(self._doorbell.step, settings.poll_seconds)),
                ("housekeeping", partial(self._housekeeping.step, settings.poll_seconds)),
            )
        ]
        workers = [
            threading.Thread(target=self._pool.serve, name=f"worker {number}", daemon=True)
            for number in range(settings.worker_threads)
        ]
        for thread in (*loops, *workers):
            thread.start()
        self._loop("runs", lambda: self._look_around(settings.poll_seconds))
        self._pool.stop()
        for thread in (*workers, *loops):
            thread.join(timeout=30)
        try:
            self._fleet.stop()
        except DeltapostError as error:
            logger.warning("leases_not_given_back", extra={"reason": str(error)})
        if server is not None:
            server.stop()

    def stop(self) -> None:
        """Asks every loop to end; `run` returns once they have."""
        self._stop.set()

    def _look_around(self, wait_seconds: float) -> None:
        self._eviction.step()
        self._discovery.step(wait_seconds)

    def _serve(self, plan: RunPlan) -> None:
        """Starts serving the run, once everything it needs is there."""
        context = RunContext(self.services, plan)
        self._pool.add(MembersTask(context, self._fleet, self._pool))
        self._fleet.serve(context)
        self._housekeeping.serve(context)

    def _loop(self, name: str, step: Callable[[], object], *, once: bool = False) -> None:
        """Steps until `stop`, or with `once` until a step succeeds."""
        pause = FIRST_PAUSE_SECONDS
        while not self._stop.is_set():
            try:
                step()
            except DeltapostError as error:
                self.services.health.problem(name, str(error))
                level = logging.WARNING if error.retryable else logging.ERROR
                logger.log(
                    level, "step_failed", extra={"loop": name, "code": error.code, "reason": str(error)}
                )
                pause = self._pause(pause if error.retryable else LONGEST_PAUSE_SECONDS)
            except Exception as error:
                self.services.health.problem(name, f"unexpected {type(error).__name__}: see the log")
                logger.exception("step_crashed", extra={"loop": name})
                pause = self._pause(LONGEST_PAUSE_SECONDS)
            else:
                self.services.health.fine(name)
                if once:
                    return
                pause = FIRST_PAUSE_SECONDS

    def _pause(self, seconds: float) -> float:
        self._stop.wait(seconds)
        return min(2 * seconds, LONGEST_PAUSE_SECONDS)


def open_services(settings: AggregatorSettings) -> Services:
    """Opens everything the settings name. Raises ConfigurationError, WrongRevision, LedgerUnavailable."""
    ledger = open_ledger(reveal(settings.ledger_url))
    ledger.check_revision()
    spool = Spool(settings.spool_directory)
    return Services(
        settings=settings,
        store=open_store(settings.store),
        log=open_log(reveal(settings.redis_url)),
        ledger=ledger,
        key=SigningKey.load(settings.signing_key_file),
        backend=NativeBackend(buffers=spool.buffers, window_bytes=settings.window_bytes),
        reach=fail_from_environment(os.environ),
        spool=spool,
    )
