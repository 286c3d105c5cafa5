"""FragmentWorker: one fragment's loop, one step at a time: lease, adopt, intake, seal, close, announce.

It keeps nothing that matters: each step starts from the fragment's row in the ledger, so a restart at any
point goes on where the row stands. What it does remember (payload bytes, the newest state, when the quorum
stood) only saves time.
"""

from __future__ import annotations

import re
import secrets
import statistics
from dataclasses import replace
from typing import Literal, TypeAlias

from deltapost.algorithms.schedule import RoundTimes, Schedule
from deltapost.algorithms.sealing import OpenRound, Ready, Waiting, readiness
from deltapost.errors import DeltapostError, LeaseLost
from deltapost.events import events
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger import leases, runs, seals
from deltapost.ledger.leases import Lease
from deltapost.ledger.rounds import Indexed
from deltapost.ledger.runs import Standing
from deltapost.ledger.seals import Sealed
from deltapost.limits import MAX_GRACE_SECONDS
from deltapost.serialization.names import envelope_stream
from deltapost.streams import START, Entry, position_key
from deltapost_aggregator.announcer import Announcer
from deltapost_aggregator.closer import Closer, Stages
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.intake import Intake

logger = events(__name__)

#: Entries judged in one transaction: bounds what is judged again after a crash.
BATCH_ENTRIES = 64

#: How an owner names a life of a stream.
_EPOCH = re.compile(r"[0-9a-f]{16}")

Progress: TypeAlias = Literal["committed", "adopted", "read", "idle", "not_owner"]


class FragmentWorker:
    """Serves one fragment of one run. `step` is called in a loop by one thread."""

    def __init__(self, context: RunContext, fragment: int) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._stream = envelope_stream(context.run, fragment)
        cache = context.services.payloads.part(context.run, fragment)
        self._intake = Intake(context, fragment, cache)
        self._closer = Closer(context, fragment, cache)
        self._announcer = Announcer(context, fragment)
        self._lease: Lease | None = None
        self._renew_at = 0.0
        self._started = False
        self._probed = False
        self._round_started: tuple[int, float] | None = None
        self._quorum_at: tuple[int, float] | None = None
        config = context.plan.config
        self._schedule = Schedule(config.sync_every, config.fragments, config.in_flight, config.overlap_steps)
        self._times = RoundTimes()
        self._waiting: str | None = None

    def step(self, wait_seconds: float) -> Progress:
        """Does the next thing that is due; waits at most `wait_seconds` for mail when nothing is.

        Raises retryable errors (store, stream or ledger unavailable): call it again after a pause.
        """
        try:
            return self._step(wait_seconds)
        except LeaseLost as error:
            logger.warning("lease_lost", extra=self._fields() | {"reason": str(error)})
            self._lease = None
            return "not_owner"

    def stop(self) -> None:
        """Gives the lease back."""
        if self._lease is not None:
            leases.release(self._services.ledger, self._lease)
            self._lease = None

    def _step(self, wait_seconds: float) -> Progress:
        lease = self._hold_lease()
        if lease is None:
            self._services.sleep(wait_seconds)
            return "not_owner"
        standing = runs.standing(self._services.ledger, lease.run, lease.fragment)
        if not self._probed:
            if self._adopt(lease, standing):
                return "adopted"
            self._probed = True
        self._announcer.announce(lease, standing)
        sealed = seals.pending(self._services.ledger, lease.run, lease.fragment, standing.head)
        if sealed is not None:
            return self._commit(lease, standing, sealed, Stages())
        standing = self._follow_stream(lease, standing)
        wait = self._wait_for(standing, wait_seconds)
        entries = self._services.log.read(
            self._stream, standing.position, limit=BATCH_ENTRIES, wait_seconds=wait
        )
        self._services.health.read_happened()
        failure: DeltapostError | None = None
        if entries:
            standing, failure = self._take(lease, standing, entries)
            if not self._probed:
                return "read"
        sealed_now = self._seal_if_ready(lease, standing)
        if sealed_now is not None:
            return self._commit(lease, standing, sealed_now, self._stages(standing))
        if failure is not None:
            raise failure
        if entries:
            return "read"
        self._probed = False
        return "idle"

    def _hold_lease(self) -> Lease | None:
        now, seconds = self._services.monotonic(), self._services.settings.lease_seconds
        if self._lease is None:
            self._lease = leases.acquire(
                self._services.ledger,
                self._context.run,
                self._fragment,
                self._services.settings.aggregator_name,
                take_own=not self._started,
                seconds=seconds,
            )
            self._started = True
            self._probed = False
            self._waiting = None
            self._renew_at = now + seconds / 3
            if self._lease is not None:
                logger.info("lease_acquired", extra=self._fields() | {"lease_epoch": self._lease.epoch})
        elif now >= self._renew_at:
            leases.renew(self._services.ledger, self._lease, seconds=seconds)
            self._renew_at = now + seconds / 3
        return self._lease

    def _adopt(self, lease: Lease, standing: Standing) -> bool:
        """Indexes the record of head + 1 if the bucket has one; whoever wrote it, the round is decided."""
        record = self._closer.read_record(standing)
        if record is None:
            return False
        self._services.reach("adopt.record_read")
        logger.info("record_adopted", extra=self._fields() | {"version": record.version})
        sealed = seals.pending(self._services.ledger, lease.run, lease.fragment, standing.head)
        indexed = self._closer.index(lease, standing, record, Stages(), sealed, own=False)
        self._services.reach("adopt.tx_done")
        self._after_commit(lease, sealed, indexed)
        return True

    def _commit(self, lease: Lease, standing: Standing, sealed: Sealed, stages: Stages) -> Progress:
        indexed = self._closer.close(lease, standing, sealed, stages)
        self._times = self._times.observed(
            step=statistics.median(claim.step_seconds for claim in sealed.content.claims),
            quorum=stages.quorum,
            sync=stages.sync,
        )
        self._after_commit(lease, sealed, indexed)
        return "committed"

    def _after_commit(self, lease: Lease, sealed: Sealed | None, indexed: Indexed) -> None:
        standing = runs.standing(self._services.ledger, lease.run, lease.fragment)
        self._round_started = (standing.head, self._services.monotonic())
        self._waiting = None
        self._announcer.announce(lease, standing)
        if sealed is not None and not indexed.rewound:
            self._announcer.trim(standing, sealed)

    def _follow_stream(self, lease: Lease, standing: Standing) -> Standing:
        """Gives a stream that was emptied, rolled back or trimmed past the position a new epoch.

        Not from the start position: nothing was read of such a life yet, and what is gone of it comes again
        by the learners' timers.
        """
        log = self._services.log
        name = log.epoch(self._stream) or log.claim_epoch(self._stream, secrets.token_hex(8))
        if _EPOCH.fullmatch(name) is None:  # whatever stands there, nobody of ours wrote it
            name = log.replace_epoch(self._stream, old=name, new=secrets.token_hex(8))
        bounds = log.bounds(self._stream)
        at = position_key(standing.position)
        behind = bounds is None or position_key(bounds.last_id) < at
        trimmed = bounds is not None and position_key(bounds.removed_through) > at
        if name == standing.stream_epoch and at != position_key(START) and (behind or trimmed):
            name = log.replace_epoch(self._stream, old=standing.stream_epoch, new=secrets.token_hex(8))
            self._services.reach("stream.reset_sent")
            logger.warning("stream_lost", extra=self._fields() | {"position": standing.position})
        if name == standing.stream_epoch:
            return standing
        ledger_intake.start_stream(self._services.ledger, lease, standing, name, START)
        self._services.reach("stream.position_tx")
        logger.info("stream_epoch", extra=self._fields() | {"stream_epoch": name})
        return replace(standing, stream_epoch=name, position=START)

    def _take(
        self, lease: Lease, standing: Standing, entries: list[Entry]
    ) -> tuple[Standing, DeltapostError | None]:
        """Judges the entries; returns where that leaves the fragment, and what kept it from going on."""
        self._services.reach("intake.read")
        if self._round_started is None or self._round_started[0] != standing.head:
            self._round_started = (standing.head, self._services.monotonic())
        taken = self._intake.take(lease, standing, entries, self._grace_seconds(), self._hold_lease)
        self._announcer.advise(lease, taken.decisions)
        if taken.record_ahead:
            self._probed = False
        if taken.decisions:
            standing = replace(standing, position=taken.decisions[-1].entry_id)
        return standing, taken.failure

    def _view(self, standing: Standing) -> OpenRound:
        return ledger_intake.open_round(
            self._services.ledger, self._context.run, self._fragment, standing.head
        )

    def _readiness(self, standing: Standing) -> Ready | Waiting:
        view = self._view(standing)
        quorum = self._context.plan.config.quorum_size
        now = self._services.monotonic()
        if len(view.slots) < quorum:
            self._quorum_at = None
        elif self._quorum_at is None or self._quorum_at[0] != standing.head:
            self._quorum_at = (standing.head, now)
        return readiness(
            accepted=view.slots,
            passed=self._context.passed(self._fragment, standing.head),
            live=self._context.live(),
            config=self._context.plan.config,
            seconds_since_quorum=now - self._quorum_at[1] if self._quorum_at else None,
            grace_seconds=self._grace_seconds(),
        )

    def _grace_seconds(self) -> float:
        """How long the open round waits past its quorum: the manifest's fixed window, or the adaptive one."""
        fixed = self._context.plan.config.grace_seconds
        adaptive = min(self._schedule.grace_seconds(self._times), MAX_GRACE_SECONDS)
        return adaptive if fixed is None else fixed

    def _wait_for(self, standing: Standing, wait_seconds: float) -> float:
        """How long to wait for mail: not past the end of an open grace window."""
        ready = self._readiness(standing)
        if isinstance(ready, Ready):
            return 0.0
        return wait_seconds if ready.seconds is None else max(0.0, min(wait_seconds, ready.seconds))

    def _seal_if_ready(self, lease: Lease, standing: Standing) -> Sealed | None:
        ready = self._readiness(standing)
        if isinstance(ready, Waiting):
            self._note_waiting(lease, ready.reason)
            return None
        self._services.reach("seal.tx_sent")
        sealed = seals.seal(self._services.ledger, lease, standing, self._context.plan.config.quorum_size)
        self._services.reach("seal.tx_done")
        logger.info(
            "round_sealed",
            extra=self._fields()
            | {"version": sealed.content.version, "participants": len(sealed.content.claims)},
        )
        return sealed

    def _note_waiting(self, lease: Lease, reason: str) -> None:
        if reason != self._waiting:
            ledger_intake.note_waiting(self._services.ledger, lease, reason)
            self._waiting = reason

    def _stages(self, standing: Standing) -> Stages:
        now = self._services.monotonic()
        started = self._round_started[1] if self._round_started else now
        if self._quorum_at is None or self._quorum_at[0] != standing.head:
            return Stages(quorum=now - started)
        return Stages(quorum=max(0.0, self._quorum_at[1] - started), grace=now - self._quorum_at[1])

    def _fields(self) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment}
