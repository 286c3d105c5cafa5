"""Closer: from a seal to a committed round: close, upload, read back, record, attest, index.

The create-once PUT of the record is the commit point. After it, whatever it answered, the record is read
back, and only the bytes that were read are attested and indexed: another owner's record is adopted the same
way. Every step can be repeated from the start; what is already there is verified instead of written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.sealing import round_record
from deltapost.errors import (
    ConfigurationError,
    ForkedHistory,
    HistoryError,
    MalformedMessage,
    ObjectConflict,
    ObjectMissing,
    SignatureRefused,
    StoreError,
)
from deltapost.events import events
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger import rounds
from deltapost.ledger.leases import Lease
from deltapost.ledger.runs import Standing
from deltapost.ledger.seals import Sealed
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization import TensorBytes, pack, unpack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import ContributionMessage, read_message
from deltapost.serialization.names import (
    anchor_key,
    attestation_key,
    delta_key,
    genesis_key,
    outer_key,
    record_key,
    update_key,
)
from deltapost.serialization.records import Attestation, Claim, Observations, Record, SealContent
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.payloads import PayloadCache

logger = events(__name__)


@dataclass
class Stages:
    """Seconds that the stages of a round took, as far as this process saw them."""

    quorum: float | None = None
    grace: float | None = None
    close: float | None = None
    sync: float | None = None


_KeyOf: TypeAlias = Callable[[str, int, int, bytes], str]


@dataclass(frozen=True)
class _Closed:
    """A closed round before anything is written: its record, the next state, and the objects by key."""

    record: Record
    state: FragmentState
    objects: list[tuple[str, bytes]]


class Closer:
    """Commits the rounds of one fragment."""

    def __init__(self, context: RunContext, fragment: int, cache: PayloadCache) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._cache = cache
        self._aggregator = context.plan.aggregator(fragment, context.services.backend)
        self._state: tuple[bytes, FragmentState] | None = None

    def close(self, lease: Lease, before: Standing, sealed: Sealed, stages: Stages) -> rounds.Indexed:
        """Commits the sealed round and indexes whichever record decides it. Raises LeaseLost, StoreError …"""
        reach, store, monotonic = self._services.reach, self._services.store, self._services.monotonic
        started = monotonic()
        closed = self._compute(before, sealed.content)
        stages.close = monotonic() - started
        for key, data in closed.objects:
            self._put_object(key, data)
            reach("objects.partial")
        reach("objects.verified")
        data = closed.record.to_bytes()
        key = record_key(self._context.run, self._fragment, closed.record.version)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise MalformedMessage(
                f"the record {key!r} has {len(data)} bytes, more than {MAX_DOCUMENT_BYTES}",
                hint="fewer learners per run, or fewer metrics per contribution",
            )
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
            self._state = (found.sha256, closed.state)
        self._cache.clear()
        return indexed

    def _compute(self, before: Standing, content: SealContent) -> _Closed:
        """The round that a seal fixes, closed: its record and its objects. Writes nothing."""
        run, fragment, base = self._context.run, self._fragment, before.head
        state = self._load_state(before)
        contributions = [self._load_contribution(claim, base) for claim in content.claims]
        self._services.reach("close.inputs_fetched")
        result = self._aggregator.close_round(state, contributions)
        objects: list[tuple[str, bytes]] = []

        def packed(key_of: _KeyOf, tensors: Mapping[str, TensorBytes]) -> ObjectRef:
            data = pack(tensors)
            sha256 = hashlib.sha256(data).digest()
            objects.append((key_of(run, fragment, base, sha256), data))
            return ObjectRef(sha256=sha256, size=len(data))

        record = round_record(
            manifest=self._context.plan.manifest,
            manifest_sha256=self._context.plan.manifest_sha256,
            seal=content,
            previous=before.head_sha256,
            result=result,
            anchor=packed(anchor_key, result.state.theta),
            outer=packed(outer_key, result.state.outer),
            update=packed(update_key, result.update) if result.update is not None else None,
        )
        return _Closed(record, result.state, objects)

    def read_record(self, before: Standing) -> Record | None:
        """The record of head + 1 in the bucket, checked to continue the head; None: definitely none."""
        version = before.head + 1
        key = record_key(self._context.run, self._fragment, version)
        try:
            data = self._services.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except ObjectMissing:
            return None
        record = Record.from_bytes(data)
        expected = (
            self._context.run,
            self._context.plan.manifest_sha256,
            self._fragment,
            version,
            before.head_sha256,
        )
        got = (record.run, record.manifest, record.fragment, record.version, record.previous)
        if got != expected:
            raise ForkedHistory(
                f"the record {key!r} does not continue version {before.head} of its fragment",
                hint="the ledger belongs to another bucket, or history was altered: deltapost ledger rebuild",
            )
        return record

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
        """Attests the record if nobody has, then writes round, participants, verdicts and head.

        A record that is not this process's `own` is attested only once it was computed again from its inputs:
        whoever can write to the bucket could have put it there. Raises HistoryError when it does not follow.
        """
        attestation = self._attestation(record)
        if attestation is None:
            if not own:
                self._vouch(before, record)
            attestation = self._attest(record, self._observations(lease, before, stages, sealed))
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

    def _attestation(self, record: Record) -> Attestation | None:
        """The attestation beside the record, verified; None when there is none. Raises SignatureRefused."""
        key = attestation_key(self._context.run, self._fragment, record.version)
        try:
            data = self._services.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except ObjectMissing:
            return None
        found = Attestation.from_bytes(data)
        found.verify(record.sha256, self._services.key.public)
        return found

    def _attest(self, record: Record, observations: Observations) -> Attestation:
        key = attestation_key(self._context.run, self._fragment, record.version)
        own = Attestation.make(record.sha256, observations, self._services.key)
        self._services.reach("attest.before_put")
        try:
            self._services.store.put(key, own.to_bytes())
        except ObjectConflict:
            logger.info("attested_before", extra=self._fields(record.version))
        self._services.reach("attest.put_sent")
        found = self._attestation(record)
        if found is None:
            raise StoreError(f"the attestation {key!r} was written and cannot be read back")
        return found

    def _vouch(self, before: Standing, record: Record) -> None:
        """Computes a record of unknown origin again, from signed envelopes and their payloads."""
        key = record_key(self._context.run, self._fragment, record.version)
        content = record.seal_content()
        try:
            for claim in content.claims:
                self._check_claim(claim, record.base)
            again = self._compute(before, content).record
        except (ObjectMissing, MalformedMessage, SignatureRefused, HistoryError, ConfigurationError) as error:
            raise HistoryError(
                f"the record {key!r} is not attested and cannot be checked: {error}"
            ) from error
        if again != record:
            raise HistoryError(
                f"the record {key!r} is not attested and does not follow from its own inputs",
                hint="somebody else wrote it: keep a copy as evidence, then remove it",
            )
        logger.warning("record_vouched_for", extra=self._fields(record.version) | {"record": key})

    def _check_claim(self, claim: Claim, base: int) -> None:
        """The claim is what its learner signed. The envelope lies beside the payload, or in the ledger."""
        frame = ledger_intake.envelope(self._services.ledger, self._context.run, claim.envelope)
        if frame is None:
            key = delta_key(self._context.run, claim.learner, self._fragment, base, claim.payload.sha256)
            frame = base64.b64decode(self._services.store.head(key).metadata.get("envelope", ""))
        signed = read_message(frame)
        public_key = self._context.public_key(claim.learner)
        if public_key is None:
            raise SignatureRefused(f"no key is registered for learner {claim.learner!r}")
        signed.verify(public_key, who=f"learner {claim.learner}")
        message = signed.message
        bound = isinstance(message, ContributionMessage) and (
            message.run,
            message.fragment,
            message.version,
        ) == (self._context.run, self._fragment, base)
        if not bound or Claim.of(signed) != claim:
            raise SignatureRefused(f"learner {claim.learner} signed another envelope than the record names")

    def _put_object(self, key: str, data: bytes) -> None:
        """Uploads under a key made of content and base, and reads the bytes back."""
        self._services.store.put(key, data)
        found = self._services.store.get(key)
        if found.data != data:
            raise StoreError(
                f"the object {key!r} reads back as {found.size} other bytes than the {len(data)} written",
                hint="something alters bytes on their way: try DELTAPOST_S3_CHECKSUMS=when_required",
            )

    def _load_contribution(self, claim: Claim, base: int) -> Contribution:
        data = self._cache.get(claim.payload.sha256)
        if data is None:
            key = delta_key(self._context.run, claim.learner, self._fragment, base, claim.payload.sha256)
            data = self._get_object(key, claim.payload)
        return Contribution(
            claim.learner,
            claim.local_step,
            claim.steps,
            claim.tokens,
            step_seconds=claim.step_seconds,
            final=claim.final,
            tensors=unpack(data),
        )

    def _load_state(self, before: Standing) -> FragmentState:
        """Anchor and outer state at the head: from memory, or from the objects its record names."""
        if self._state is not None and self._state[0] == before.head_sha256:
            return self._state[1]
        run, fragment = self._context.run, self._fragment
        if before.head == 0:
            genesis = self._context.plan.manifest.genesis[fragment]
            theta = unpack(self._get_object(genesis_key(run, fragment, genesis.sha256), genesis))
            state = genesis_state(self._context.plan.specs(fragment), theta)
        else:
            record = rounds.record_of(self._services.ledger, run, fragment, before.head)
            if record is None:
                raise HistoryError(
                    f"the ledger lacks record {before.head} of fragment {fragment} of run {run!r}",
                    hint="rebuild it from the bucket: deltapost ledger rebuild",
                )
            base = record.base
            anchor = self._get_object(anchor_key(run, fragment, base, record.anchor.sha256), record.anchor)
            outer = self._get_object(outer_key(run, fragment, base, record.outer.sha256), record.outer)
            state = FragmentState(version=before.head, theta=unpack(anchor), outer=unpack(outer))
        self._state = (before.head_sha256, state)
        return state

    def _get_object(self, key: str, ref: ObjectRef) -> bytes:
        """The object's bytes, verified against the reference. Raises ObjectMissing, HistoryError."""
        blob = self._services.store.get(key, length=ref.size + 1)
        if blob.size != ref.size or hashlib.sha256(blob.data).digest() != ref.sha256:
            raise HistoryError(
                f"the object {key!r} no longer has the bytes its record names "
                f"({blob.size} bytes, expected {ref.size})",
                hint="restore the object from a copy of the bucket",
            )
        return blob.data

    def _fields(self, version: int) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment, "version": version}
