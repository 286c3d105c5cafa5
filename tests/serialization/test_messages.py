"""Whatever bytes arrive, reading them gives a signed message or MalformedMessage, nothing else."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltapost.errors import MalformedMessage, SignatureRefused
from deltapost.limits import MAX_CONTRIBUTION_BYTES, MAX_MESSAGE_BYTES
from deltapost.serialization.documents import FORMAT, ObjectRef, encode_canonical
from deltapost.serialization.messages import (
    AdviceMessage,
    AliveMessage,
    CommitMessage,
    ContributionMessage,
    JoinMessage,
    LeaveMessage,
    Message,
    PassMessage,
    RunMessage,
    read_message,
    sign_message,
)
from fixtures.pipeline import learner_signing_key

KEY = learner_signing_key("ada")
PAYLOAD = ObjectRef(sha256=hashlib.sha256(b"payload").digest(), size=7)
MEMBER = {"run": "r", "learner": "ada", "session": 3, "counter": 9}
CONTRIBUTION = ContributionMessage(
    run="r",
    learner="ada",
    fragment=0,
    version=5,
    payload=PAYLOAD,
    local_step=100,
    steps=20,
    tokens=4096,
    step_seconds=0.5,
    loss=2.25,
    metrics={"grad_norm": 1.5},
)
MESSAGES: list[Message] = [
    CONTRIBUTION,
    JoinMessage(**MEMBER),
    AliveMessage(**MEMBER, local_step=12, waiting=True),
    LeaveMessage(**MEMBER),
    PassMessage(**MEMBER, fragment=2, version=7),
    CommitMessage(run="r", fragment=1, version=3, record=PAYLOAD.sha256),
    AdviceMessage(run="r", fragment=1, version=3, learner="ada", envelope=PAYLOAD.sha256, verdict="late"),
    RunMessage(run="r", manifest=PAYLOAD.sha256, public_key=KEY.public),
]


def frame_of(body: bytes, *, version: object = FORMAT, signature: bytes | None = None) -> bytes:
    """A frame around any body, signed as it should be."""
    signed = KEY.sign("message", body) if signature is None else signature
    return encode_canonical([version, body, signed])


def body_with(change: Callable[[dict[str, Any]], object]) -> bytes:
    plain = CONTRIBUTION.model_dump()
    change(plain)
    packed: bytes = msgpack.packb({name: plain[name] for name in sorted(plain)})
    return packed


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_kind_comes_back_as_it_was_signed(message: Message) -> None:
    signed = sign_message(message, KEY)

    again = read_message(signed.frame)

    assert again == signed
    again.verify(KEY.public, who="ada")


def test_equal_arguments_give_equal_bytes() -> None:
    assert sign_message(CONTRIBUTION, KEY).frame == sign_message(CONTRIBUTION.model_copy(), KEY).frame


def test_the_largest_contribution_fits_its_limit_and_s3_metadata() -> None:
    message = CONTRIBUTION.model_copy(
        update={
            "run": "r" * 64,
            "learner": "l" * 64,
            "fragment": 1023,
            "version": 2**53,
            "payload": ObjectRef(sha256=PAYLOAD.sha256, size=5 * 1024**3),
            "local_step": 2**53,
            "steps": 2**53,
            "tokens": 2**53,
            "metrics": {f"{'m' * 22}{number:02}": math.pi for number in range(16)},
        }
    )

    frame = sign_message(message, KEY).frame

    assert len(frame) <= MAX_CONTRIBUTION_BYTES
    assert read_message(frame).message == message
    assert 4 * math.ceil(len(frame) / 3) <= 1_900


@pytest.mark.parametrize(
    "field",
    ["steps", "tokens", "local_step", "version", "fragment"],
)
def test_a_bool_is_no_integer(field: str) -> None:
    with pytest.raises(MalformedMessage, match=r"canonical|valid integer"):
        read_message(frame_of(body_with(lambda plain: plain.update({field: True}))))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda plain: plain.update(extra=1), id="unknown field"),
        pytest.param(lambda plain: plain.pop("steps"), id="missing field"),
        pytest.param(lambda plain: plain.update(kind="contributions"), id="unknown kind"),
        pytest.param(lambda plain: plain.update(kind=7), id="kind of another type"),
        pytest.param(lambda plain: plain.update(steps=-1), id="negative counter"),
        pytest.param(lambda plain: plain.update(steps=2**53 + 1), id="counter past 2**53"),
        pytest.param(lambda plain: plain.update(steps=1.0), id="float for an integer"),
        pytest.param(lambda plain: plain.update(step_seconds=1), id="integer for a float"),
        pytest.param(lambda plain: plain.update(steps="1"), id="text for an integer"),
        pytest.param(lambda plain: plain.update(learner=b"ada"), id="bytes for text"),
        pytest.param(lambda plain: plain.update(step_seconds=math.nan), id="NaN"),
        pytest.param(lambda plain: plain.update(step_seconds=math.inf), id="infinity"),
        pytest.param(lambda plain: plain.update(step_seconds=-1.0), id="negative seconds"),
        pytest.param(lambda plain: plain.update(loss=math.nan), id="NaN loss"),
        pytest.param(lambda plain: plain.update(metrics={"a": math.inf}), id="infinite metric"),
        pytest.param(lambda plain: plain.update(metrics={"A": 1.0}), id="metric name"),
        pytest.param(lambda plain: plain.update(metrics={"a" * 25: 1.0}), id="long metric name"),
        pytest.param(lambda plain: plain.update(metrics={f"m{i}": 1.0 for i in range(17)}), id="17 metrics"),
        pytest.param(lambda plain: plain.update(learner="Ada"), id="upper-case id"),
        pytest.param(lambda plain: plain.update(learner="ada\n"), id="newline in id"),
        pytest.param(lambda plain: plain.update(learner="a/../b"), id="path in id"),
        pytest.param(lambda plain: plain.update(learner=""), id="empty id"),
        pytest.param(lambda plain: plain.update(learner="a" * 65), id="long id"),
        pytest.param(lambda plain: plain.update(learner="а"), id="look-alike id"),
        pytest.param(lambda plain: plain.update(payload=[b"x" * 32, 7]), id="array for a map"),
        pytest.param(lambda plain: plain["payload"].update(sha256=b"x" * 31), id="short digest"),
        pytest.param(lambda plain: plain["payload"].update(size=-1), id="negative size"),
        pytest.param(lambda plain: plain.update(fragment=1024), id="fragment out of range"),
        pytest.param(lambda plain: plain.update(final=1), id="integer for a bool"),
        pytest.param(lambda plain: plain.update(final=None), id="nil for a bool"),
    ],
)
def test_a_body_that_says_anything_else_is_malformed(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(MalformedMessage):
        read_message(frame_of(body_with(change)))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


BODY = CONTRIBUTION.to_bytes()


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="reserved byte"),
        pytest.param(b"\xc0", id="nil"),
        pytest.param(frame_of(BODY)[:-1], id="truncated"),
        pytest.param(frame_of(BODY) + b"\x00", id="trailing byte"),
        pytest.param(frame_of(BODY) * 2, id="two frames"),
        pytest.param(frame_of(BODY + b"\x00"), id="trailing byte in the body"),
        pytest.param(frame_of(BODY, version=2), id="another format"),
        pytest.param(frame_of(BODY, version=True), id="bool format"),
        pytest.param(frame_of(BODY, signature=b"s" * 63), id="short signature"),
        pytest.param(encode_canonical([1, BODY]), id="two parts"),
        pytest.param(encode_canonical({"a": 1}), id="a map"),
        pytest.param(encode_canonical([1, "text", b"s" * 64]), id="text body"),
        pytest.param(b"\xdc\x00\x03" + frame_of(BODY)[1:], id="long form of the array"),
        pytest.param(frame_of(b"\x81" + b"\x80" + b"\x01"), id="unhashable key"),
        pytest.param(frame_of(b"\x81\x01\x01"), id="integer key"),
        pytest.param(frame_of(b"\xd4\x05\x00"), id="extension type"),
        pytest.param(frame_of(b"\xd6\xff\x00\x00\x00\x00"), id="timestamp"),
        pytest.param(frame_of(b"\xa2\xff\xfe"), id="invalid UTF-8"),
        pytest.param(frame_of(b"\xdd\xff\xff\xff\xff"), id="an array that claims 2**32 items"),
        pytest.param(frame_of(b"\xc6\xff\xff\xff\xff"), id="bytes that claim 4 GiB"),
        pytest.param(frame_of(nested(5_000)), id="5,000 levels"),
        pytest.param(b"x" * 20_000, id="oversize"),
        pytest.param(frame_of(BODY[:-1] + b"\xcc\x01"), id="long form of an integer"),
        pytest.param(frame_of(b"\x82" + 2 * (b"\xa4kind" + b"\xaccontribution")), id="duplicate key"),
    ],
)
def test_a_frame_in_any_other_form_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_message(frame)


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_message(data)


def test_a_frame_above_the_limit_is_refused_before_anything_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(msgpack, "unpackb", lambda data, **_: parsed.append(len(data)))

    with pytest.raises(MalformedMessage, match=f"at most {MAX_MESSAGE_BYTES} are read"):
        read_message(bytes(MAX_MESSAGE_BYTES + 1))

    assert parsed == []


@given(st.data())
def test_a_mutated_frame_is_malformed_or_fails_its_signature(data: st.DataObject) -> None:
    frame = bytearray(sign_message(CONTRIBUTION, KEY).frame)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(frame) - 1))
        frame[position] ^= data.draw(st.integers(1, 255))
    if bytes(frame) == sign_message(CONTRIBUTION, KEY).frame:
        return

    with pytest.raises((MalformedMessage, SignatureRefused)):
        read_message(bytes(frame)).verify(KEY.public, who="ada")


def test_another_key_a_swapped_body_and_another_domain_do_not_verify() -> None:
    signed = sign_message(CONTRIBUTION, KEY)
    other = sign_message(CONTRIBUTION.model_copy(update={"tokens": 4097}), KEY)
    swapped = read_message(encode_canonical([FORMAT, other.body, signed.signature]))
    attested = read_message(frame_of(signed.body, signature=KEY.sign("attestation", signed.body)))

    for message, key in [
        (signed, learner_signing_key("bob").public),
        (swapped, KEY.public),
        (attested, KEY.public),
        (signed, b"\x00" * 32),
    ]:
        with pytest.raises(SignatureRefused, match="ada"):
            message.verify(key, who="ada")


def test_an_error_never_shows_the_bytes_that_came() -> None:
    secret = "s3cr3t" * 20
    with pytest.raises(MalformedMessage) as caught:
        read_message(frame_of(body_with(lambda plain: plain.update(learner=secret))))

    assert secret not in str(caught.value)


def test_a_float32_is_not_the_canonical_form_of_a_number() -> None:
    body = CONTRIBUTION.to_bytes()
    double = struct.pack(">Bd", 0xCB, 0.5)
    assert body.count(double) == 1

    with pytest.raises(MalformedMessage, match="canonical"):
        read_message(frame_of(body.replace(double, struct.pack(">Bf", 0xCA, 0.5))))
