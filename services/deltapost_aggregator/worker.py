"""FragmentWorker: one fragment's loop, one step at a time: lease, adopt, intake, seal, close, announce.

It keeps nothing that matters: each step starts from the fragment's row in the ledger, so a restart at any
point goes on where the row stands. What it does remember (payload bytes, the newest state, when the quorum
stood) only saves time.
"""

from __future__ import annotations

import math
import re
import secrets
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

from deltapost.algorithms.sealing import Waiting
from deltapost.errors import DeltapostError, LeaseLost
from deltapost.events import events
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger import leases, runs, seals
from deltapost.ledger.leases import Lease
from deltapost.ledger.rounds import Indexed
from deltapost.ledger.runs import Standing
from deltapost.ledger.seals import Sealed
from deltapost.limits import FIRST_RESET_PAUSE_SECONDS, LONGEST_RESET_PAUSE_SECONDS, PROBE_SECONDS
from deltapost.serialization.names import envelope_stream
from deltapost.streams import START, Entry, position_key
from deltapost_aggregator.announcer import Announcer
from deltapost_aggregator.caution import BATCH_ENTRIES
from deltapost_aggregator.closer import Closer
from deltapost_aggregator.computing import LeftOut
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.ending import Ending, FragmentOver
from deltapost_aggregator.intake import Intake
from deltapost_aggregator.policy import Policy, SealPolicy, Stages
from deltapost_aggregator.recovering import StillRecovering

logger = events(__name__)

#: How an owner names a life of a stream.
_EPOCH = re.compile(r"[0-9a-f]{16}")

Progress: TypeAlias = Literal[
    "committed", "adopted", "left_out", "recovering", "read", "idle", "not_owner", "ended", "finished"
]


class FragmentWorker:
    """Serves one fragment of one run. `step` is called in a loop by one thread."""

    def __init__(
        self,
        context: RunContext,
        fragment: int,
        policy: Policy | None = None,
        probe_seconds: Callable[[], float] = lambda: PROBE_SECONDS,
    ) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._stream = envelope_stream(context.run, fragment)
        self._cache = cache = context.services.payloads.part(context.run, fragment)
        self._intake = Intake(context, fragment, cache)
        self._closer = Closer(context, fragment, cache)
        self._announcer = Announcer(context, fragment)
        self._ending = Ending(context, fragment, self._closer.last_anchor)
        self._lease: Lease | None = None
        self._renew_at = 0.0
        self._started = False
        self._probed = False
        self._probe_at = 0.0
        self._probe_seconds = probe_seconds
        self._policy: Policy = SealPolicy(context, fragment) if policy is None else policy
        self._waiting: str | None = None
        self._reset_pause = FIRST_RESET_PAUSE_SECONDS
        self._reset_at = float("-inf")
        self._position = START
        self._due_seconds = math.inf

    @property
    def lease(self) -> Lease | None:
        """The lease as this worker knows it."""
        return self._lease

    def lease_renewed(self) -> None:
        """Somebody renewed the lease on the worker's behalf."""
        self._renew_at = self._services.monotonic() + self._services.settings.lease_seconds / 2

    def doubt_lease(self) -> None:
        """The lease may be another's: the next step renews it, and gives up if that fails."""
        self._renew_at = -math.inf

    def waits_for(self) -> tuple[str, str, float]:
        """After an idle step: stream and position at which mail would come, and when a look is due anyway."""
        return self._stream, self._position, self._due_seconds

    def forget(self) -> None:
        """Frees what only saved time: the fragment is served elsewhere from now on."""
        self._cache.clear()

    def step(self) -> Progress:
        """Does the next thing that is due; when nothing is, `waits_for` says what would be.

        Raises retryable errors (store, stream or ledger unavailable): call it again after a pause.
        """
        try:
            return self._step()
        except LeaseLost as error:
            logger.warning("lease_lost", extra=self._fields() | {"reason": str(error)})
            self._lost_lease()
            return "not_owner"
        except DeltapostError as error:
            self._note_failure(error)
            raise

    def stop(self) -> None:
        """Gives the lease back."""
        if self._lease is not None:
            leases.release(self._services.ledger, self._lease)
            self._lost_lease()

    def _lost_lease(self) -> None:
        self._lease = None
        self._waiting = None
        self._services.health.waits(self._component, None)

    def _step(self) -> Progress:
        lease = self._hold_lease()
        if lease is None:
            return "not_owner"
        standing = runs.standing(self._services.ledger, lease.run, lease.fragment)
        if standing.ended:
            if not self._ending.finished(lease):
                return "ended"
            self.stop()
            return "finished"
        try:
            return self._go_on(lease, standing)
        except StillRecovering:
            return "recovering"
        except FragmentOver as found:
            self._ending.adopt(lease, standing, found.end)
            self._announcer.announce_end(lease, found.end)
            return "ended"

    def _go_on(self, lease: Lease, standing: Standing) -> Progress:
        if not self._probed or self._services.monotonic() >= self._probe_at:
            if self._adopt(lease, standing):
                return "adopted"
            self._found_nothing()
        self._announcer.announce(lease, standing)
        sealed = seals.pending(self._services.ledger, lease.run, lease.fragment, standing.head)
        if sealed is not None:
            return self._commit(lease, standing, sealed, Stages())
        if standing.finishing:
            self._ending.end(lease, standing)
            self._probed = False  # whatever stands in the slot now is adopted
            return "adopted" if self._adopt(lease, standing) else "idle"
        standing = self._follow_stream(lease, standing)
        self._position = standing.position
        entries = self._services.log.read(self._stream, standing.position, limit=self._intake.limit)
        self._services.health.read_happened()
        failure: DeltapostError | None = None
        if entries:
            standing, failure = self._take(lease, standing, entries)
            if not self._probed:
                return "read"
        else:
            self._intake.forget()
        sealed_now = self._seal_if_ready(lease, standing, more=len(entries) == BATCH_ENTRIES)
        if sealed_now is not None:
            return self._commit(lease, standing, sealed_now, self._policy.stages(standing.head))
        if failure is not None:
            raise failure
        if entries:
            return "read"
        self._announcer.remind(lease, standing)
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
                self._intake.begin(self._lease)
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

    def _found_nothing(self) -> None:
        """Head + 1 has no record now. One that another owner writes late is looked for again after a while;
        an `ahead`, or the PUT of one's own record, meets it sooner.
        """
        self._probed = True
        self._probe_at = self._services.monotonic() + self._probe_seconds()

    def _commit(self, lease: Lease, standing: Standing, sealed: Sealed, stages: Stages) -> Progress:
        outcome = self._closer.close(lease, standing, sealed, stages)
        if isinstance(outcome, LeftOut):
            self._leave_out(lease, standing, sealed, outcome)
            return "left_out"
        if outcome.rewound:  # another owner decided this round, and perhaps the next
            self._probed = False
        else:
            self._found_nothing()
        self._policy.committed(
            statistics.median(claim.step_seconds for claim in sealed.content.claims), stages
        )
        self._after_commit(lease, sealed, outcome)
        return "committed"

    def _leave_out(self, lease: Lease, standing: Standing, sealed: Sealed, found: LeftOut) -> None:
        """Seals the next generation without what cannot be merged, or opens the round again."""
        config = self._context.plan.config
        following = seals.leave_out(
            self._services.ledger,
            lease,
            standing,
            sealed,
            found.verdicts,
            quorum_size=config.quorum_size,
            min_quorum=config.min_quorum,
        )
        facts = self._fields() | {"version": standing.head + 1, "reason": found.reason}
        if following is None:
            self._services.reach("seal.reopen_tx")
            logger.warning("round_reopened", extra=facts)
            self._note_waiting(lease, f"opened again: {found.reason}")
        else:
            self._services.reach("seal.generation_tx")
            logger.warning("seal_generation", extra=facts | {"generation": following.content.generation})

    def _after_commit(self, lease: Lease, sealed: Sealed | None, indexed: Indexed) -> None:
        standing = runs.standing(self._services.ledger, lease.run, lease.fragment)
        self._policy.begin(standing.head)
        self._going_on()
        self._reset_pause = FIRST_RESET_PAUSE_SECONDS
        self._announcer.announce(lease, standing, indexed)
        if sealed is not None and not indexed.rewound:
            self._announcer.trim(standing, sealed)

    def _follow_stream(self, lease: Lease, standing: Standing) -> Standing:
        """Gives a stream that was emptied, rolled back or trimmed past the position a new epoch.

        Not from the start position: nothing was read of such a life yet, and what is gone of it comes again
        by the learners' timers. A stream that is lost again and again gets its new names ever more slowly:
        each makes every learner post again.
        """
        log = self._services.log
        name = log.epoch(self._stream) or log.claim_epoch(self._stream, secrets.token_hex(8))
        if _EPOCH.fullmatch(name) is None:  # whatever stands there, nobody of ours wrote it
            name = log.replace_epoch(self._stream, old=name, new=secrets.token_hex(8))
        bounds = log.bounds(self._stream)
        at = position_key(standing.position)
        behind = bounds is None or position_key(bounds.last_id) < at
        trimmed = bounds is not None and position_key(bounds.removed_through) > at
        lost = name == standing.stream_epoch and at != position_key(START) and (behind or trimmed)
        if lost and self._services.monotonic() >= self._reset_at:
            self._reset_at = self._services.monotonic() + self._reset_pause
            self._reset_pause = min(2 * self._reset_pause, LONGEST_RESET_PAUSE_SECONDS)
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
        self._policy.begin(standing.head)
        taken = self._intake.take(lease, standing, entries, self._policy, self._hold_lease)
        self._announcer.advise(lease, taken.decisions)
        if taken.record_ahead:
            self._probed = False
        if taken.decisions:
            standing = replace(standing, position=taken.decisions[-1].entry_id)
        return standing, taken.failure

    def _seal_if_ready(self, lease: Lease, standing: Standing, *, more: bool) -> Sealed | None:
        """`more`: entries probably wait still, so why the round does not close is said after them."""
        view = self._intake.open_round(lease, standing)
        ready = self._policy.ready(view, standing.position)
        if isinstance(ready, Waiting):
            self._due_seconds = math.inf if ready.seconds is None else max(0.0, ready.seconds)
            if not more:
                self._note_waiting(lease, ready.reason)
            return None
        self._services.reach("seal.tx_sent")
        sealed = seals.seal(self._services.ledger, lease, standing, self._context.plan.config.quorum_size)
        self._services.reach("seal.tx_done")
        self._going_on()
        logger.info(
            "round_sealed",
            extra=self._fields()
            | {"version": sealed.content.version, "participants": len(sealed.content.claims)},
        )
        return sealed

    def _note_waiting(self, lease: Lease, reason: str) -> None:
        """Says why the round does not close, once for each reason: in ledger, log and readiness."""
        if reason != self._waiting:
            ledger_intake.note_waiting(self._services.ledger, lease, reason)
            logger.info("round_waits", extra=self._fields() | {"reason": reason})
            self._services.health.waits(self._component, reason)
            self._waiting = reason

    def _note_failure(self, error: DeltapostError) -> None:
        """The same for what keeps the fragment from going on, as far as the ledger can be told."""
        if self._lease is None:
            return
        try:
            self._note_waiting(self._lease, f"{error.code}: {error}")
        except DeltapostError as failure:
            logger.warning("waiting_not_noted", extra=self._fields() | {"reason": str(failure)})

    def _going_on(self) -> None:
        self._waiting = None
        self._services.health.waits(self._component, None)

    @property
    def _component(self) -> str:
        return f"run {self._context.run} fragment {self._fragment}"

    def _fields(self) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment}
