"""Ending: how a fragment's owner ends it when somebody asked that the run be finished.

The end takes the create-once key of the record that would come next: of a last round that a stale owner still
writes and the end, one wins, and the owner goes by what it reads back. Killed anywhere, the next owner finds
the end there, or writes its own. The owner that finds all fragments ended writes `RUN/end`.

The last anchor lies in the bucket whole: one between checkpoints is uploaded before the end is written, so
that whoever has the bucket reads the final model without computing anything. Should its inputs be lost, the
fragment ends all the same: checkpoint and updates lead to that anchor too, and a log line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from deltapost.algorithms.checkpoints import is_checkpoint
from deltapost.errors import ForkedHistory, HistoryError, ObjectConflict, ObjectMissing
from deltapost.events import events
from deltapost.ledger import ending
from deltapost.ledger.leases import Lease
from deltapost.ledger.runs import Standing
from deltapost.serialization.ends import FragmentEnd, RunEnd
from deltapost.serialization.names import end_key, record_key
from deltapost.serialization.records import Attestation, Observations
from deltapost.serialization.tensor import Buffer
from deltapost_aggregator.attestations import find_attestation, write_attestation
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.objects import put_verified

logger = events(__name__)


class FragmentOver(Exception):
    """No error: the slot of the next record holds the fragment's end."""

    def __init__(self, end: FragmentEnd) -> None:
        super().__init__(f"fragment {end.fragment} of run {end.run!r} ended before version {end.version}")
        self.end = end


class Ending:
    """Ends one fragment."""

    def __init__(
        self, context: RunContext, fragment: int, last_anchor: Callable[[Standing], tuple[str, Buffer]]
    ) -> None:
        """`last_anchor` gives the key and bytes of the anchor at the head."""
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._last_anchor = last_anchor

    def finished(self, lease: Lease) -> bool:
        """Whether all fragments have ended as this one has; sees to it that the run then does."""
        ledger = self._services.ledger
        ends = ending.ends(ledger, lease.run)
        if len(ends) < len(self._context.plan.fragments):
            return False
        if ending.state(ledger, lease.run) != "finished":
            made = RunEnd.make(
                lease.run,
                self._context.plan.manifest_sha256,
                tuple(ends[fragment] for fragment in range(len(ends))),
                self._services.key,
            )
            self._services.store.put(end_key(lease.run), made.to_bytes())
            self._services.reach("end.run_put")
            ending.finish(ledger, lease)
            self._services.reach("end.run_tx_done")
            logger.info("run_finished", extra={"run": lease.run})
        self._context.finished = True
        return True

    def end(self, lease: Lease, before: Standing) -> None:
        """Writes the fragment's end, after its last anchor. The caller adopts what its slot then holds."""
        if not is_checkpoint(before.head, self._context.plan.config.checkpoint_every):
            self._put_last_anchor(before)
        ledger, reach = self._services.ledger, self._services.reach
        unverified, over_quota = ending.counts(ledger, lease.run, lease.fragment, before.head + 1)
        end = FragmentEnd(
            run=lease.run,
            manifest=self._context.plan.manifest_sha256,
            fragment=lease.fragment,
            version=before.head + 1,
            previous=before.head_sha256,
            answers=tuple(ending.unanswered(ledger, lease.run, lease.fragment)),
            unverified=unverified,
            over_quota=over_quota,
        )
        reach("end.before_put")
        try:
            self._services.store.put(record_key(lease.run, lease.fragment, end.version), end.to_bytes())
        except ObjectConflict:
            logger.info("end_found_taken", extra=self._fields(end.version))
        reach("end.put_sent")

    def _put_last_anchor(self, before: Standing) -> None:
        try:
            key, data = self._last_anchor(before)
        except (HistoryError, ObjectMissing) as error:
            logger.warning(
                "last_anchor_not_written", extra=self._fields(before.head) | {"reason": str(error)}
            )
            return
        put_verified(self._services.store, key, data)
        self._services.reach("end.anchor_put")

    def adopt(self, lease: Lease, before: Standing, end: FragmentEnd) -> None:
        """Has an end that was read attested, and indexes it. Raises HistoryError where it is a stranger's."""
        expected = (
            lease.run,
            self._context.plan.manifest_sha256,
            lease.fragment,
            before.head + 1,
            before.head_sha256,
        )
        if (end.run, end.manifest, end.fragment, end.version, end.previous) != expected:
            raise ForkedHistory(
                f"the end {record_key(lease.run, lease.fragment, before.head + 1)!r} does not continue "
                f"version {before.head} of its fragment"
            )
        attestation = self._attest(lease, before, end)
        self._services.reach("end.attested")
        ending.index(self._services.ledger, lease, before, end, attestation)
        self._services.reach("end.tx_done")
        logger.info("fragment_ended", extra=self._fields(end.version) | {"answers": len(end.answers)})

    def _attest(self, lease: Lease, before: Standing, end: FragmentEnd) -> Attestation:
        found = find_attestation(self._services, end)
        if found is not None:
            return found
        self._vouch(end)
        observations = Observations(
            owner=lease.owner,
            lease_epoch=lease.epoch,
            stream_epoch=before.stream_epoch,
            position=before.position,
            committed_at=datetime.now(UTC).isoformat(),
        )
        return write_attestation(self._services, end, observations)

    def _vouch(self, end: FragmentEnd) -> None:
        """Signs no stranger's end: somebody must have asked for it, and it must say what the ledger knows."""
        key = record_key(end.run, end.fragment, end.version)
        if not ending.requested(self._services.ledger, end.run):
            raise HistoryError(
                f"the object {key!r} is an end that nobody asked for here, and it is not attested",
                hint=f"deltapost run finish {end.run}, if it is right; else keep a copy and remove it",
            )
        found = {answer.envelope: answer for answer in end.answers}
        for answer in ending.unanswered(self._services.ledger, end.run, end.fragment):
            if found.get(answer.envelope, answer) != answer:
                raise HistoryError(
                    f"the end {key!r} answers envelope {answer.envelope.hex()[:16]}… otherwise than it was "
                    "decided, and it is not attested",
                    hint="somebody else wrote it: keep a copy as evidence, then remove it",
                )
        if any(answer.verdict == "accepted" for answer in end.answers):
            raise HistoryError(f"the end {key!r} calls a contribution accepted: no end merges anything")

    def _fields(self, version: int) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment, "version": version}
