"""Discovery: which runs there are, from the ledger and from the stream on which runs are announced.

An announcement only says where to look: the manifest in the bucket is what counts.
"""

from __future__ import annotations

import logging

from deltapost.algorithms.plan import RunPlan
from deltapost.errors import (
    ConfigurationError,
    DeltapostError,
    HistoryError,
    InvalidTensor,
    MalformedMessage,
    ObjectMissing,
)
from deltapost.ledger import runs
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.messages import RunMessage, read_message
from deltapost.serialization.names import RUNS_STREAM, manifest_key
from deltapost.serialization.records import Manifest
from deltapost.streams import START, position_key
from deltapost_aggregator.context import Services

logger = logging.getLogger(__name__)

BATCH_ENTRIES = 128


class Discovery:
    """Finds runs to serve. `step` is called in a loop by one thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._position = START
        self._served: set[str] = set()
        self._refused: dict[str, str] = {}

    def known(self) -> list[RunPlan]:
        """Runs that the ledger holds and this aggregator has not returned before."""
        plans = []
        for manifest in runs.active(self._services.ledger):
            if manifest.run not in self._served:
                plan = self._plan(manifest)
                if plan is not None:
                    plans.append(plan)
        return plans

    def step(self, wait_seconds: float) -> list[RunPlan]:
        """Runs announced since the last call, copied into the ledger. Raises retryable errors."""
        log = self._services.log
        bounds = log.bounds(RUNS_STREAM)
        if bounds is None or position_key(bounds.last_id) < position_key(self._position):
            self._position = START
        found = []
        for entry in log.read(RUNS_STREAM, self._position, limit=BATCH_ENTRIES, wait_seconds=wait_seconds):
            run = self._announced(entry.data)
            if run is not None and run not in self._served and self._services.settings.serves(run):
                plan = self._admit(run)
                if plan is not None:
                    found.append(plan)
            self._position = entry.id
        return found

    def _announced(self, data: bytes | None) -> str | None:
        try:
            signed = read_message(data or b"")
            if not isinstance(signed.message, RunMessage):
                raise MalformedMessage(f"a {signed.message.kind} message announces no run")
        except MalformedMessage as error:
            logger.info("run_announcement_refused", extra={"reason": str(error)})
            return None
        return signed.message.run

    def _admit(self, run: str) -> RunPlan | None:
        try:
            data = self._services.store.get(manifest_key(run), length=MAX_DOCUMENT_BYTES + 1).data
            manifest = Manifest.from_bytes(data)
            if manifest.run != run:
                raise MalformedMessage(f"the manifest of run {run!r} is of run {manifest.run!r}")
        except (ObjectMissing, MalformedMessage) as error:
            logger.warning("run_refused", extra={"run": run, "reason": str(error)})
            return None
        return self._plan(manifest)

    def _plan(self, manifest: Manifest) -> RunPlan | None:
        """The plan of a run that can be served; else None, with the reason in log and readiness."""
        run = manifest.run
        if not self._services.settings.serves(run):
            return None
        try:
            plan = RunPlan.of(manifest)
            if manifest.aggregator_key not in (None, self._services.key.public):
                raise ConfigurationError(
                    f"run {run!r} pins the aggregator key {(manifest.aggregator_key or b'').hex()[:16]}…, "
                    f"this aggregator signs with {self._services.key.public.hex()[:16]}…",
                    hint="give it the run's key with DELTAPOST_SIGNING_KEY_FILE, "
                    "or leave the run out of DELTAPOST_SERVE_RUNS",
                )
            runs.admit(self._services.ledger, manifest)
        except (ConfigurationError, MalformedMessage, InvalidTensor, HistoryError) as error:
            self._refuse(run, error)
            return None
        self._served.add(run)
        self._services.health.fine(f"run {run}")
        logger.info("run_served", extra={"run": run, "fragments": len(plan.fragments)})
        return plan

    def _refuse(self, run: str, error: DeltapostError) -> None:
        if self._refused.get(run) != str(error):
            self._refused[run] = str(error)
            self._services.health.problem(f"run {run}", str(error))
            logger.error("run_refused", extra={"run": run, "reason": str(error)})
