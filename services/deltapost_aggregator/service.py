"""AggregatorService: threads around the workers, one for each fragment, and what keeps them going.

A retryable failure of store, stream or ledger is waited out with back-off and shows in `/readyz`; any other
error of a fragment is logged, shown and tried again more slowly: one bad fragment or run never stops the
others.
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
from deltapost.streams import open_log
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.discovery import Discovery
from deltapost_aggregator.health import HealthServer
from deltapost_aggregator.members import MembersReader
from deltapost_aggregator.settings import AggregatorSettings
from deltapost_aggregator.worker import FragmentWorker

logger = events(__name__)

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0


class AggregatorService:
    """Serves every allowed run until `stop`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._workers: list[FragmentWorker] = []
        self._discovery = Discovery(services, self._serve)

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
        self._loop("runs", lambda: self._discovery.step(settings.poll_seconds))
        for thread in self._threads:
            thread.join(timeout=30)
        for worker in self._workers:
            try:
                worker.stop()
            except DeltapostError as error:
                logger.warning("lease_not_released", extra={"reason": str(error)})
        if server is not None:
            server.stop()

    def stop(self) -> None:
        """Asks every loop to end; `run` returns once they have."""
        self._stop.set()

    def _serve(self, plan: RunPlan) -> None:
        """Starts the run's threads, once everything they need is there."""
        poll = self.services.settings.poll_seconds
        context = RunContext(self.services, plan)
        members = MembersReader(context)
        workers = [FragmentWorker(context, fragment) for fragment in range(len(plan.fragments))]
        self._start(f"run {plan.run} members", partial(members.step, poll))
        for fragment, worker in enumerate(workers):
            self._workers.append(worker)
            self._start(f"run {plan.run} fragment {fragment}", partial(worker.step, poll))

    def _start(self, name: str, step: Callable[[], object]) -> None:
        thread = threading.Thread(target=self._loop, args=(name, step), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _loop(self, name: str, step: Callable[[], object]) -> None:
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
                pause = FIRST_PAUSE_SECONDS

    def _pause(self, seconds: float) -> float:
        self._stop.wait(seconds)
        return min(2 * seconds, LONGEST_PAUSE_SECONDS)


def open_services(settings: AggregatorSettings) -> Services:
    """Opens everything the settings name. Raises ConfigurationError, WrongRevision, LedgerUnavailable."""
    ledger = open_ledger(reveal(settings.ledger_url))
    ledger.check_revision()
    return Services(
        settings=settings,
        store=open_store(settings.store),
        log=open_log(reveal(settings.redis_url)),
        ledger=ledger,
        key=SigningKey.load(settings.signing_key_file),
        backend=NativeBackend(),
        reach=fail_from_environment(os.environ),
    )
