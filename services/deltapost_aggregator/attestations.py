"""Attestations: the signature beside what stands in a record's slot, written create-once and read back."""

from __future__ import annotations

from typing import Protocol

from deltapost.errors import ObjectConflict, ObjectMissing, StoreError
from deltapost.events import events
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization.names import attestation_key
from deltapost.serialization.records import Attestation, Observations
from deltapost_aggregator.context import Services

logger = events(__name__)


class Slot(Protocol):
    """A record, or a fragment's end."""

    @property
    def run(self) -> str: ...
    @property
    def fragment(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def sha256(self) -> bytes: ...


def find_attestation(services: Services, slot: Slot) -> Attestation | None:
    """The attestation beside it, verified; None when there is none. Raises SignatureRefused."""
    key = attestation_key(slot.run, slot.fragment, slot.version)
    try:
        data = services.store.get(key, length=MAX_DOCUMENT_BYTES + 1).data
    except ObjectMissing:
        return None
    found = Attestation.from_bytes(data)
    found.verify(slot.sha256, services.key.public)
    return found


def write_attestation(services: Services, slot: Slot, observations: Observations) -> Attestation:
    """Signs it, unless another owner was faster; returns what stands there then."""
    key = attestation_key(slot.run, slot.fragment, slot.version)
    made = Attestation.make(slot.sha256, observations, services.key)
    services.reach("attest.before_put")
    try:
        services.store.put(key, made.to_bytes())
    except ObjectConflict:
        logger.info("attested_before", extra={"run": slot.run, "key": key})
    services.reach("attest.put_sent")
    found = find_attestation(services, slot)
    if found is None:
        raise StoreError(f"the attestation {key!r} was written and cannot be read back")
    return found
