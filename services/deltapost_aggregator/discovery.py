"""Discovery: which runs there are, from the ledger and from the stream on which runs are announced.

An announcement only says where to look: the manifest in the bucket is what counts. A run stays wanted until
it is served or refused for good, so a store that does not answer delays it and forgets nothing; one run that
cannot be served never hides another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from deltapost.algorithms.plan import RunPlan
from deltapost.errors import ConfigurationError, DeltapostError, HistoryError, MalformedMessage
from deltapost.ledger import runs
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.messages import RunMessage, read_message
from deltapost.serialization.names import RUNS_STREAM, manifest_key
from deltapost.serialization.records import Manifest
from deltapost.streams import START, position_key
from deltapost_aggregator.context import Services

logger = logging.getLogger(__name__)

BATCH_ENTRIES = 128
#: Runs that are announced and cannot be had yet; more than these are not remembered.
MAX_WANTED = 1_024


class Discovery:
    """Finds runs and hands each to `serve` once. `step` is called in a loop by one thread."""

    def __init__(self, services: Services, serve: Callable[[RunPlan], None]) -> None:
        self._services = services
        self._serve = serve
        self._position = START
        self._ledger_read = False
        #: Runs to look at, with their manifest where the ledger has it.
        self._wanted: dict[str, Manifest | None] = {}
        self._served: set[str] = set()

    def step(self, wait_seconds: float) -> None:
        """Looks for runs and serves what it finds. Raises what is worth another try."""
        if not self._ledger_read:
            for manifest in runs.active(self._services.ledger):
                self._want(manifest.run, manifest)
            self._ledger_read = True
        log = self._services.log
        bounds = log.bounds(RUNS_STREAM)
        if bounds is None or position_key(bounds.last_id) < position_key(self._position):
            self._position = START
        wait = 0.0 if self._wanted else wait_seconds
        for entry in log.read(RUNS_STREAM, self._position, limit=BATCH_ENTRIES, wait_seconds=wait):
            self._position = entry.id
            run = self._announced(entry.data)
            if run is not None:
                self._want(run, None)
        self._services.health.read_happened()
        failure: DeltapostError | None = None
        for run in list(self._wanted):
            try:
                self._offer(run, self._wanted[run])
            except DeltapostError as error:
                if error.retryable:
                    failure = error
                    continue
                # A run that somebody only claims there is says nothing about this aggregator's own state.
                own = isinstance(error, ConfigurationError | HistoryError)
                self._refuse(run, str(error), show=own)
            except Exception as error:
                logger.exception("run_refused", extra={"run": run})
                self._refuse(run, f"its manifest cannot be used: {type(error).__name__}", show=False)
            del self._wanted[run]
        if failure is not None:
            raise failure

    def _want(self, run: str, manifest: Manifest | None) -> None:
        if run in self._served or not self._services.settings.serves(run):
            return
        if run in self._wanted or len(self._wanted) < MAX_WANTED:
            self._wanted[run] = manifest or self._wanted.get(run)

    def _announced(self, data: bytes | None) -> str | None:
        try:
            signed = read_message(data or b"")
            if not isinstance(signed.message, RunMessage):
                raise MalformedMessage(f"a {signed.message.kind} message announces no run")
        except MalformedMessage as error:
            logger.info("run_announcement_refused", extra={"reason": str(error)})
            return None
        return signed.message.run

    def _offer(self, run: str, manifest: Manifest | None) -> None:
        """Serves the run. Raises why it cannot be."""
        if manifest is None:
            data = self._services.store.get(manifest_key(run), length=MAX_DOCUMENT_BYTES + 1).data
            manifest = Manifest.from_bytes(data)
        if manifest.run != run:
            raise MalformedMessage(f"the manifest of run {run!r} is of run {manifest.run!r}")
        plan = RunPlan.of(manifest)
        if manifest.aggregator_key not in (None, self._services.key.public):
            raise ConfigurationError(
                f"run {run!r} pins the aggregator key {(manifest.aggregator_key or b'').hex()[:16]}…, "
                f"this aggregator signs with {self._services.key.public.hex()[:16]}…",
                hint="give it the run's key with DELTAPOST_SIGNING_KEY_FILE, "
                "or leave the run out of DELTAPOST_SERVE_RUNS",
            )
        runs.admit(self._services.ledger, manifest)
        self._serve(plan)
        self._served.add(run)
        self._services.health.fine(f"run {run}")
        logger.info("run_served", extra={"run": run, "fragments": len(plan.fragments)})

    def _refuse(self, run: str, reason: str, *, show: bool) -> None:
        if show:
            self._services.health.problem(f"run {run}", reason)
        logger.error("run_refused", extra={"run": run, "reason": reason})
