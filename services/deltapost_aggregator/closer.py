"""Closer: from a seal to a committed round: compute, upload, read back, record, attest, index.

The create-once PUT of the record is the commit point. After it, whatever it answered, the record is read
back, and only the bytes that were read are attested and indexed: another owner's record is adopted the same
way. Every step can be repeated from the start; what is already there is verified instead of written. A seal
that cannot be closed any more leads to no record but to the names of whom to leave out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from deltapost.errors import HistoryError, MalformedMessage, NonFinite, ObjectConflict, StoreError
from deltapost.events import events
from deltapost.ledger import rounds, seals
from deltapost.ledger.leases import Lease
from deltapost.ledger.runs import Standing
from deltapost.ledger.seals import Sealed
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.names import record_key
from deltapost.serialization.records import Observations, Record
from deltapost.serialization.tensor import Buffer
from deltapost_aggregator.attesting import Attester
from deltapost_aggregator.cache import PayloadCache
from deltapost_aggregator.computing import ClosedRound, LeftOut, RoundComputer
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.objects import put_verified
from deltapost_aggregator.policy import Stages

logger = events(__name__)


class Closer:
    """Commits the rounds of one fragment."""

    def __init__(self, context: RunContext, fragment: int, cache: PayloadCache) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._computer = RoundComputer(context, fragment, cache)
        self._attester = Attester(context, fragment, self._computer)

    def read_record(self, before: Standing) -> Record | None:
        """The record of head + 1, if the bucket has one. Raises ForkedHistory."""
        return self._attester.read_record(before)

    def close(
        self, lease: Lease, before: Standing, sealed: Sealed, stages: Stages
    ) -> rounds.Indexed | LeftOut:
        """Commits the sealed round and indexes whichever record decides it. Raises LeaseLost, StoreError …

        LeftOut: the seal cannot be closed as it is, and the bucket has no record of the round.
        """
        reach, store, monotonic = self._services.reach, self._services.store, self._services.monotonic
        started = monotonic()
        closed = self._compute(before, sealed)
        if isinstance(closed, LeftOut):
            record = self.read_record(before)
            if record is not None:
                return self.index(lease, before, record, stages, sealed, own=False)
            reach("seal.lost_detected")
            return closed
        stages.close = monotonic() - started
        uploads = [partial(put_verified, store, key, data) for key, data in closed.objects]
        for _ in self._services.transfers.each(uploads):
            reach("objects.partial")
        reach("objects.verified")
        data = closed.record.to_bytes()
        key = record_key(self._context.run, self._fragment, closed.record.version)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise MalformedMessage(
                f"the record {key!r} has {len(data)} bytes, more than {MAX_DOCUMENT_BYTES}",
                hint="fewer learners per run, or fewer metrics per contribution",
            )
        seals.note_record(self._services.ledger, lease, closed.record)
        reach("record.noted")
        reach("record.before_put")
        try:
            store.put(key, data)
        except ObjectConflict:
            logger.warning("record_of_another_seal", extra=self._fields(closed.record.version))
        reach("record.put_sent")
        found = self.read_record(before)
        if found is None:
            raise StoreError(
                f"the record {key!r} was written and cannot be read back",
                hint="the store is not read-after-write consistent, or its policy hides records",
            )
        reach("record.read_back")
        stages.sync = monotonic() - started
        own = found.sha256 == closed.record.sha256
        indexed = self.index(lease, before, found, stages, sealed, own=own)
        if own:
            self._computer.remember(closed)
        return indexed

    def last_anchor(self, head: Standing) -> tuple[str, Buffer]:
        """Key and bytes of the anchor at the head. Raises what `RoundComputer.compute` does."""
        return self._computer.anchor(head)

    def _compute(self, before: Standing, sealed: Sealed) -> ClosedRound | LeftOut:
        try:
            return self._computer.compute(before, sealed.content)
        except NonFinite as error:
            return self._computer.largest(sealed.content, before.head, error)
        except (HistoryError, StoreError):
            lost = self._computer.lost(sealed.content, before.head)
            return self._computer.compute(before, sealed.content) if lost is None else lost

    def index(
        self,
        lease: Lease,
        before: Standing,
        record: Record,
        stages: Stages,
        sealed: Sealed | None,
        *,
        own: bool,
    ) -> rounds.Indexed:
        """Has the record attested, then writes round, participants, verdicts, head. `own`: computed here."""
        observations = self._observations(lease, before, stages, sealed)
        origin = "own" if own else seals.origin(self._services.ledger, record)
        attestation = self._attester.attest(before, record, observations, origin)
        self._context.named.note(record)
        self._services.reach("round.tx_sent")
        indexed = rounds.index(self._services.ledger, lease, record, attestation)
        self._services.reach("round.tx_done")
        logger.info(
            "round_committed",
            extra=self._fields(record.version)
            | {
                "record": record.sha256.hex(),
                "participants": len(record.participants),
                "cosine": record.cosine,
                "degraded": record.degraded,
                "rewound": indexed.rewound,
            },
        )
        return indexed

    def _observations(
        self, lease: Lease, before: Standing, stages: Stages, sealed: Sealed | None
    ) -> Observations:
        return Observations(
            owner=lease.owner,
            lease_epoch=lease.epoch,
            stream_epoch=sealed.stream_epoch if sealed else before.stream_epoch,
            position=sealed.position if sealed else before.position,
            committed_at=datetime.now(UTC).isoformat(),
            quorum_seconds=stages.quorum,
            grace_seconds=stages.grace,
            close_seconds=stages.close,
            sync_seconds=stages.sync,
        )

    def _fields(self, version: int) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment, "version": version}
