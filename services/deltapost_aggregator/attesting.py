"""Attesting: records as the bucket holds them, and the signature that says they are this run's.

Nothing is signed on trust. A record this process wrote is its own; one that it merely finds is attested only
once it was computed again from envelopes that its learners signed: whoever can write to the bucket could
have put it there.
"""

from __future__ import annotations

import base64

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
from deltapost.ledger.runs import Standing
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.messages import ContributionMessage, read_message
from deltapost.serialization.names import attestation_key, delta_key, record_key
from deltapost.serialization.records import Attestation, Claim, Observations, Record
from deltapost_aggregator.computing import RoundComputer
from deltapost_aggregator.context import RunContext

logger = events(__name__)


class Attester:
    """Reads, checks and attests the records of one fragment."""

    def __init__(self, context: RunContext, fragment: int, computer: RoundComputer) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._computer = computer

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

    def attest(
        self, before: Standing, record: Record, observations: Observations, *, own: bool
    ) -> Attestation:
        """The attestation of the record: the one that is there, else a new one by this aggregator's key.

        `own`: this process computed the record. Any other is computed again first. Raises HistoryError when
        it does not follow from its inputs, SignatureRefused when another key attested it.
        """
        found = self._find(record)
        if found is not None:
            return found
        if not own:
            self._vouch(before, record)
        key = attestation_key(self._context.run, self._fragment, record.version)
        made = Attestation.make(record.sha256, observations, self._services.key)
        self._services.reach("attest.before_put")
        try:
            self._services.store.put(key, made.to_bytes())
        except ObjectConflict:
            logger.info("attested_before", extra=self._fields(record.version))
        self._services.reach("attest.put_sent")
        found = self._find(record)
        if found is None:
            raise StoreError(f"the attestation {key!r} was written and cannot be read back")
        return found

    def _find(self, record: Record) -> Attestation | None:
        """The attestation beside the record, verified; None when there is none. Raises SignatureRefused."""
        key = attestation_key(self._context.run, self._fragment, record.version)
        try:
            data = self._services.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
        except ObjectMissing:
            return None
        found = Attestation.from_bytes(data)
        found.verify(record.sha256, self._services.key.public)
        return found

    def _vouch(self, before: Standing, record: Record) -> None:
        """Computes a record of unknown origin again, from signed envelopes and their payloads."""
        key = record_key(self._context.run, self._fragment, record.version)
        content = record.seal_content()
        try:
            for claim in content.claims:
                self._check_claim(claim, record.base)
            again = self._computer.compute(before, content).record
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

    def _fields(self, version: int) -> dict[str, object]:
        return {"run": self._context.run, "fragment": self._fragment, "version": version}
