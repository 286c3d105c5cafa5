"""Discovery: which runs there are, from the ledger and from the stream on which runs are announced.

An announcement only says where to look: the manifest in the bucket is what counts. A run stays wanted until
it is served or refused for good, so a store that does not answer delays it and forgets nothing; one run that
cannot be served never hides another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltapost.algorithms.plan import RunPlan
from deltapost.audit.history import BucketHistory
from deltapost.errors import (
    ConfigurationError,
    DeltapostError,
    LedgerError,
    MalformedMessage,
    ObjectConflict,
    RunMismatch,
    StoreError,
)
from deltapost.events import events
from deltapost.ledger import completing, ending, runs
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.messages import RunMessage, read_message
from deltapost.serialization.names import RUNS_STREAM, aggregator_object_key, manifest_key
from deltapost.serialization.records import Manifest
from deltapost.streams import START, position_key
from deltapost_aggregator.context import Services

logger = events(__name__)

BATCH_ENTRIES = 128
#: Strangers' runs that are announced and cannot be had yet; more than these are not remembered.
MAX_WANTED = 1_024
#: Seconds until an announced run without a manifest is looked for again: doubled each time, up to the second.
FIRST_LOOK_AGAIN_SECONDS = 1.0
LONGEST_LOOK_AGAIN_SECONDS = 60.0
#: Seconds between two looks at the ledger for runs that another aggregator copied there.
LEDGER_SECONDS = 10.0


@dataclass
class _Wanted:
    """A run to look at; `indexed` is the hash of its manifest where the ledger has one.

    One that is only named in the settings may not be there yet, and nothing is wrong with that.
    """

    indexed: bytes | None
    announced: bool
    at: float = 0.0
    pause: float = FIRST_LOOK_AGAIN_SECONDS
    reason: str = ""


class Discovery:
    """Finds runs and hands each to `serve` once. `step` is called in a loop by one thread."""

    def __init__(self, services: Services, serve: Callable[[RunPlan], None]) -> None:
        self._services = services
        self._serve = serve
        self._position = START
        self._ledger_at = float("-inf")
        self._wanted: dict[str, _Wanted] = {}
        self._served: dict[str, Manifest] = {}
        self._finished: set[str] = set()

    def step(self, wait_seconds: float) -> None:
        """Looks for runs and serves what it finds. Raises what is worth another try."""
        if self._services.monotonic() >= self._ledger_at:
            for manifest in runs.active(self._services.ledger):
                self._want(manifest.run, manifest.sha256)
            self._index_again()
            # Redis may have forgotten who announced it: what the operator names is looked for by itself.
            for named in self._services.settings.named_runs():
                self._want(named, None, announced=False)
            self._ledger_at = self._services.monotonic() + LEDGER_SECONDS
        log = self._services.log
        bounds = log.bounds(RUNS_STREAM)
        if bounds is None or position_key(bounds.last_id) < position_key(self._position):
            self._position = START
        for entry in log.read(RUNS_STREAM, self._position, limit=BATCH_ENTRIES, wait_seconds=wait_seconds):
            self._position = entry.id
            run = self._announced(entry.data)
            if run is not None:
                self._want(run, None)
        self._services.health.read_happened()
        failure: DeltapostError | None = None
        now = self._services.monotonic()
        for run, wanted in list(self._wanted.items()):
            if now < wanted.at:
                continue
            try:
                self._offer(run, wanted)
            except (StoreError, LedgerError) as error:
                if error.retryable:
                    failure = error
                    continue
                # Refused today is not refused for good: the manifest may come, a policy may be mended.
                wanted.at = now + wanted.pause
                wanted.pause = min(2 * wanted.pause, LONGEST_LOOK_AGAIN_SECONDS)
                self._refuse(run, wanted, f"its manifest cannot be had (is DELTAPOST_STORE right?): {error}")
                continue
            except DeltapostError as error:
                self._refuse(run, wanted, str(error))
            except Exception as error:
                logger.exception("run_refused", extra={"run": run})
                self._refuse(run, wanted, f"its manifest cannot be used: {type(error).__name__}")
            del self._wanted[run]
        if failure is not None:
            raise failure

    def _index_again(self) -> None:
        """A database that was made anew, or is an older copy, gets back the runs that are served here."""
        missing = self._served.keys() - runs.names(self._services.ledger) if self._served else set()
        for run in sorted(missing):
            manifest = self._served[run]
            learners = BucketHistory(self._services.store, manifest, self._services.key.public).learners()
            runs.admit(self._services.ledger, manifest)
            completing.add_learners(self._services.ledger, run, learners)
            logger.warning("run_indexed_again", extra={"run": run})

    def _want(self, run: str, indexed: bytes | None, *, announced: bool = True) -> None:
        if run in self._served or run in self._finished or not self._services.settings.serves(run):
            return
        if run in self._wanted:
            self._wanted[run].announced |= announced
            return
        strangers = [name for name, wanted in self._wanted.items() if not self._expected(name, wanted)]
        if len(strangers) >= MAX_WANTED:  # the one that was looked for in vain most often makes room
            del self._wanted[max(strangers, key=lambda name: self._wanted[name].pause)]
        self._wanted[run] = _Wanted(indexed, announced)

    def _expected(self, run: str, wanted: _Wanted) -> bool:
        """Whether the operator counts on this run: it is named in the settings, or indexed."""
        return wanted.indexed is not None or self._services.settings.names(run)

    def _announced(self, data: bytes | None) -> str | None:
        try:
            signed = read_message(data or b"")
            if not isinstance(signed.message, RunMessage):
                raise MalformedMessage(f"a {signed.message.kind} message announces no run")
        except MalformedMessage as error:
            logger.info("run_announcement_refused", extra={"reason": str(error)})
            return None
        return signed.message.run

    def _offer(self, run: str, wanted: _Wanted) -> None:
        """Serves the run. Raises why it cannot be."""
        data = self._services.store.get(manifest_key(run), length=MAX_DOCUMENT_BYTES + 1).data
        manifest = Manifest.from_bytes(data)
        if manifest.run != run:
            raise MalformedMessage(f"the manifest of run {run!r} is of run {manifest.run!r}")
        if wanted.indexed not in (None, manifest.sha256):
            raise RunMismatch(
                f"run {run!r}: the ledger knows manifest {(wanted.indexed or b'').hex()[:16]}…, "
                f"the store holds {manifest.sha256.hex()[:16]}…",
                hint="one ledger serves one store: check DELTAPOST_STORE and DELTAPOST_LEDGER_URL",
            )
        plan = RunPlan.of(manifest)
        self._check_key(manifest)
        runs.admit(self._services.ledger, manifest)
        if ending.state(self._services.ledger, run) == "finished":
            self._finished.add(run)
            logger.info("run_is_finished", extra={"run": run})
            return
        self._serve(plan)
        self._served[run] = manifest
        self._services.health.fine(f"run {run}")
        logger.info("run_served", extra={"run": run, "fragments": len(plan.fragments)})

    def _check_key(self, manifest: Manifest) -> None:
        """Only the holder of the run's key may serve it: the manifest's, else the first one's that did."""
        store, own = self._services.store, self._services.key.public
        pinned = manifest.aggregator_key
        if pinned is None:
            key = aggregator_object_key(manifest.run)
            try:
                store.put(key, own)
                return
            except ObjectConflict:
                pinned = store.get(key, length=33).data
        if pinned != own:
            raise ConfigurationError(
                f"run {manifest.run!r} belongs to the aggregator key {pinned.hex()[:16]}…, "
                f"this aggregator signs with {own.hex()[:16]}…",
                hint="give it the run's key with DELTAPOST_SIGNING_KEY_FILE, "
                "or leave the run out of DELTAPOST_SERVE_RUNS",
            )

    def _refuse(self, run: str, wanted: _Wanted, reason: str) -> None:
        """Says why: in readiness only for a run that is expected here, in the log when the reason is new."""
        if not wanted.announced:
            logger.debug("run_not_there", extra={"run": run, "reason": reason})
            return
        if self._expected(run, wanted):
            self._services.health.problem(f"run {run}", reason)
        if wanted.reason != reason:
            wanted.reason = reason
            logger.error("run_refused", extra={"run": run, "reason": reason})
