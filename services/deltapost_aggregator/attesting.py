"""Attesting: records as the bucket holds them, and the signature that says they are this run's.

Nothing is signed on trust. A record this process wrote is its own, and one whose hash an owner noted in the
ledger is that owner's; any other that it finds is attested only once it was computed again from envelopes
that its learners signed: whoever can write to the bucket could have put it there.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Literal

from deltapost.algorithms.admission import check_payload, delta_norm, judge_counters, judge_norm
from deltapost.algorithms.checkpoints import check_checkpoint
from deltapost.errors import (
    DeltapostError,
    ForkedHistory,
    HistoryError,
    ObjectMissing,
    SignatureRefused,
    StoreError,
)
from deltapost.events import events
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger.runs import Standing
from deltapost.ledger.seals import Origin
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.ends import FragmentEnd, read_slot
from deltapost.serialization.messages import ContributionMessage, read_message
from deltapost.serialization.names import delta_key, envelope_stream, record_key
from deltapost.serialization.records import Attestation, Claim, Observations, Record, SealContent
from deltapost.streams import START
from deltapost_aggregator.attestations import find_attestation, write_attestation
from deltapost_aggregator.computing import RoundComputer
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.ending import FragmentOver
from deltapost_aggregator.objects import put_verified

logger = events(__name__)

#: How far an envelope is looked for in its stream.
STREAM_BATCH = 256
MAX_STREAM_BATCHES = 64


class Attester:
    """Reads, checks and attests the records of one fragment."""

    def __init__(self, context: RunContext, fragment: int, computer: RoundComputer) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._computer = computer

    def read_record(self, before: Standing) -> Record | None:
        """The record of head + 1 in the bucket, checked to continue the head; None: definitely none.

        Raises FragmentOver where the fragment's end stands there.
        """
        version = before.head + 1
        key = record_key(self._context.run, self._fragment, version)
        try:
            data = self._services.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except ObjectMissing:
            return None
        record = read_slot(data)
        if isinstance(record, FragmentEnd):
            raise FragmentOver(record)
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
        check_checkpoint(record, self._context.plan.config.checkpoint_every)
        return record

    def attest(
        self, before: Standing, record: Record, observations: Observations, origin: Literal["own"] | Origin
    ) -> Attestation:
        """The attestation of the record: the one that is there, else a new one by this aggregator's key.

        `origin`: `own` if this process computed the record, else what the ledger knows of it; one that no
        owner noted is computed again first. One's own is attested without a look: the create-once PUT finds
        an attestation that is there as well. Raises HistoryError when the record does not follow from its
        inputs, SignatureRefused when another key attested it.
        """
        if origin != "own":
            found = find_attestation(self._services, record)
            if found is not None:
                return found
        if origin in ("sealed", "unknown"):
            self._vouch(before, record, origin)
        return write_attestation(self._services, record, observations)

    def _vouch(self, before: Standing, record: Record, origin: str) -> None:
        """Computes a record of unknown origin again, and makes sure that what it names is there.

        One that follows no seal of this ledger (it was restored, or is new) must be one that some owner could
        have sealed: enough participants, each signed by its learner and fit to be admitted. Which of the fit
        contributions it took, and what it answers the others, cannot be known from the bucket.
        """
        key = record_key(self._context.run, self._fragment, record.version)
        content = record.seal_content()
        try:
            if origin == "unknown":
                self._check_quorum(content)
                for claim in content.claims:
                    self._check_claim(claim, record.base)
            closed = self._computer.compute(before, content)
        except (DeltapostError, ValueError) as error:
            says_nothing = isinstance(error, StoreError) and not isinstance(error, ObjectMissing)
            if says_nothing or (isinstance(error, DeltapostError) and error.retryable):
                raise
            raise self._refused(key, error) from error
        if closed.record != record:
            raise HistoryError(
                f"the record {key!r} is not attested and does not follow from its own inputs",
                hint="somebody else wrote it: keep a copy as evidence, then remove it",
            )
        for object_key, data in closed.objects:
            put_verified(self._services.store, object_key, data)
        logger.warning("record_vouched_for", extra=self._fields(record.version) | {"record": key})

    def _refused(self, key: str, error: Exception) -> HistoryError:
        return HistoryError(
            f"the record {key!r} is not attested and cannot be checked: {error}",
            hint="somebody else wrote it, or its inputs are gone",
        )

    def _check_quorum(self, content: SealContent) -> None:
        config = self._context.plan.config
        learners = [claim.learner for claim in content.claims]
        if learners != sorted(set(learners)):
            raise HistoryError("its participants are not one for each learner, in order")
        # Degraded with a quorum is possible: learners that are new at a version do not count for it.
        quorum = len(learners) >= config.quorum_size
        marked_wrong = (
            content.degraded if quorum and content.version == 1 else content.degraded < (not quorum)
        )
        if len(learners) < config.min_quorum or marked_wrong:
            raise HistoryError(
                f"{len(learners)} participants, degraded={content.degraded}: no owner seals that with quorum "
                f"{config.quorum_size} and minimum {config.min_quorum}"
            )

    def _check_claim(self, claim: Claim, base: int) -> None:
        """The claim is what its learner signed, and its contribution would have been admitted."""
        signed = read_message(self._envelope(claim, base))
        refused = self._context.keys.refusal(signed, claim.learner, base)
        if refused is not None:
            raise SignatureRefused(refused.detail)
        message = signed.message
        bound = isinstance(message, ContributionMessage) and (
            message.run,
            message.fragment,
            message.version,
        ) == (self._context.run, self._fragment, base)
        if not bound or Claim.of(signed) != claim:
            raise SignatureRefused(f"learner {claim.learner} signed another envelope than the record names")
        plan = self._context.plan
        verdict: str | None = judge_counters(claim.steps, claim.tokens, plan.config)
        if claim.payload.size > plan.max_payload_bytes(self._fragment):
            verdict = "too_large"
        if verdict is None:
            specs = plan.specs(self._fragment)
            entries = check_payload(self._computer.payload(claim, base), specs, plan.delta_codec)
            norm = delta_norm(entries, specs, plan.delta_codec, self._services.backend)
            verdict = judge_norm(norm, plan.config)
        if verdict is not None:
            raise HistoryError(f"the contribution of learner {claim.learner} would have been {verdict}")

    def _envelope(self, claim: Claim, base: int) -> bytes:
        """The claim's envelope: from the ledger, from beside its payload, or from the fragment's stream."""
        frame = ledger_intake.envelope(self._services.ledger, self._context.run, claim.envelope)
        if frame is not None:
            return frame
        key = delta_key(self._context.run, claim.learner, self._fragment, base, claim.payload.sha256)
        frame = base64.b64decode(self._services.store.head(key).metadata.get("envelope", ""))
        if hashlib.sha256(frame).digest() == claim.envelope:
            return frame
        # A payload announced twice (counters corrected) keeps its first envelope; the stream holds both.
        stream, position = envelope_stream(self._context.run, self._fragment), START
        for _ in range(MAX_STREAM_BATCHES):
            entries = self._services.log.read(stream, position, limit=STREAM_BATCH)
            for entry in entries:
                position = entry.id
                if entry.data is not None and hashlib.sha256(entry.data).digest() == claim.envelope:
                    return entry.data
            if not entries:
                break
        raise HistoryError(f"the envelope {claim.envelope.hex()[:16]}… of learner {claim.learner} is nowhere")

    def _fields(self, version: int) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment, "version": version}
