"""Manifest, seal, record and attestation have one byte form each, and say no when anything is altered."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from deltapost.errors import ConfigurationError, MalformedMessage, SignatureRefused
from deltapost.serialization.documents import ObjectRef, encode_canonical
from deltapost.serialization.records import (
    Answer,
    Attestation,
    Claim,
    Manifest,
    MergedClaim,
    Observations,
    Parameter,
    Record,
    SealContent,
)
from fixtures.pipeline import AGGREGATOR_KEY, learner_signing_key, plain_config

HASH = hashlib.sha256(b"x").digest()
REF = ObjectRef(sha256=HASH, size=100)
CLAIM: dict[str, Any] = {
    "learner": "ada",
    "envelope": HASH,
    "payload": REF,
    "local_step": 10,
    "steps": 5,
    "tokens": 500,
    "step_seconds": 0.1,
    "loss": None,
    "metrics": {},
    "final": False,
}
MANIFEST = Manifest(
    arithmetic=1,
    run="r",
    parameters=(Parameter(name="w", dtype="F32", shape=(2, 3)),),
    fragments=(("w",),),
    genesis=(REF,),
    algorithm=plain_config().to_fields(),
    creator_key=learner_signing_key("creator").public,
)
RECORD = Record(
    arithmetic=1,
    run="r",
    manifest=MANIFEST.sha256,
    fragment=0,
    version=1,
    previous=MANIFEST.sha256,
    generation=0,
    degraded=False,
    participants=(MergedClaim(**CLAIM, weight=50000.0, norm=1.5, cosine=1.0),),
    cosine=None,
    answers=(Answer(envelope=b"y" * 32, learner="bob", version=0, verdict="zero_steps"),),
    unverified={"malformed": 2},
    over_quota={"eve": 1},
    anchor=REF,
    outer=REF,
    checkpoint=True,
    update=None,
)
SEAL = SealContent(
    run="r",
    fragment=0,
    version=1,
    generation=0,
    claims=(Claim(**CLAIM),),
    answers=RECORD.answers,
    unverified={"malformed": 2},
    over_quota={"eve": 1},
    degraded=False,
)
OBSERVED = Observations(
    owner="host-1",
    lease_epoch=3,
    stream_epoch="abc",
    position="5-0",
    committed_at="2026-11-30T12:00:00+00:00",
    close_seconds=0.25,
)


@pytest.mark.parametrize("document", [MANIFEST, RECORD, SEAL, OBSERVED], ids=lambda one: type(one).__name__)
def test_a_document_comes_back_from_its_bytes(document: Any) -> None:
    again = type(document).from_bytes(document.to_bytes())

    assert again == document
    assert again.to_bytes() == document.to_bytes()


def test_the_bytes_of_manifest_and_record_are_those_of_format_1() -> None:
    """What is in a bucket must stay readable, and every chain must keep its hashes."""
    assert RECORD.sha256.hex() == "818c8b5a3684025d253b61a3defca08c24f21ae81ffdb325bd3afa8d5fa50b40"
    assert MANIFEST.sha256.hex() == "7fb4381d5a343dff644470fe3b7d52c5f4010e7ed273aa73640d2503118ebcae"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("version", 0),
        ("participants", ()),
        ("cosine", 1.0000001),
        ("previous", b"short"),
        ("unverified", {"malformed": 0}),
        ("unverified", {"rude": 1}),
        ("over_quota", {"Eve": 1}),
        ("degraded", 0),
    ],
)
def test_a_record_that_could_not_be_is_malformed(field: str, value: object) -> None:
    plain = RECORD.model_dump() | {field: value}

    with pytest.raises(MalformedMessage, match="Record"):
        Record.from_bytes(encode_canonical(plain))


def test_a_manifest_names_one_genesis_anchor_for_each_fragment() -> None:
    plain = MANIFEST.model_dump() | {"genesis": ()}

    with pytest.raises(MalformedMessage, match="genesis"):
        Manifest.from_bytes(encode_canonical(plain))


def test_a_record_answers_every_envelope_it_lists() -> None:
    assert RECORD.verdicts() == {HASH: "accepted", b"y" * 32: "zero_steps"}


@pytest.mark.parametrize(
    "change",
    [
        {"claims": (Claim(**{**CLAIM, "envelope": b"z" * 32}),)},
        {"claims": (Claim(**CLAIM), Claim(**{**CLAIM, "learner": "bob", "envelope": b"z" * 32}))},
        {"answers": ()},
        {"unverified": {"malformed": 3}},
        {"over_quota": {}},
        {"generation": 1},
        {"degraded": True},
    ],
)
def test_a_record_follows_only_the_seal_it_says(change: dict[str, Any]) -> None:
    assert RECORD.follows(SEAL)
    assert not RECORD.follows(SEAL.model_copy(update=change))


def test_an_attestation_verifies_for_its_record_and_key_only() -> None:
    attestation = Attestation.from_bytes(Attestation.make(RECORD.sha256, OBSERVED, AGGREGATOR_KEY).to_bytes())

    assert attestation.verify(RECORD.sha256, AGGREGATOR_KEY.public) == OBSERVED
    assert attestation.verify(RECORD.sha256, None) == OBSERVED
    with pytest.raises(SignatureRefused, match="of record"):
        attestation.verify(HASH, AGGREGATOR_KEY.public)
    with pytest.raises(SignatureRefused, match="aggregator key"):
        attestation.verify(RECORD.sha256, learner_signing_key("ada").public)


@pytest.mark.parametrize(
    "forged",
    [
        {"observations": OBSERVED.model_copy(update={"owner": "host-2"}).to_bytes()},
        {"signature": b"s" * 64},
        {"public_key": learner_signing_key("ada").public},
    ],
)
def test_an_altered_attestation_does_not_verify(forged: dict[str, bytes]) -> None:
    attestation = Attestation.make(RECORD.sha256, OBSERVED, AGGREGATOR_KEY).model_copy(update=forged)

    with pytest.raises(SignatureRefused):
        attestation.verify(RECORD.sha256, None)


@pytest.mark.parametrize("moment", ["2026-11-30T12:00:00", "2026-11-30 12:00:00+00:00", "yesterday"])
def test_a_time_without_an_offset_or_in_another_form_is_refused(moment: str) -> None:
    with pytest.raises(MalformedMessage, match="committed_at"):
        Observations.from_bytes(encode_canonical(OBSERVED.model_dump() | {"committed_at": moment}))


def test_a_plan_refuses_another_arithmetic_and_fragments_that_do_not_add_up() -> None:
    from deltapost.algorithms.plan import RunPlan

    with pytest.raises(ConfigurationError, match="arithmetic version 2"):
        RunPlan.of(MANIFEST.model_copy(update={"arithmetic": 2}))
    with pytest.raises(MalformedMessage, match="each of the schema's parameters once"):
        RunPlan.of(MANIFEST.model_copy(update={"fragments": (("w", "w"),)}))
    with pytest.raises(MalformedMessage, match="1 fragments, the manifest 2"):
        RunPlan.of(
            MANIFEST.model_copy(
                update={
                    "parameters": (
                        Parameter(name="v", dtype="F32", shape=()),
                        *MANIFEST.parameters,
                    ),
                    "fragments": (("w",), ("v",)),
                    "genesis": (REF, REF),
                }
            )
        )
