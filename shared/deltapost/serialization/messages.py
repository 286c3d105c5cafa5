"""Messages on the streams: framed [format, body, Ed25519 signature], strict in every respect.

A message is a doorbell: it says that something is in the bucket, or that somebody is there. It holds no clock
and no tensor. Whatever bytes arrive, reading them gives a SignedMessage or raises MalformedMessage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Final, Literal, TypeAlias, get_args

from pydantic import Field

from deltapost.errors import MalformedMessage
from deltapost.limits import (
    MAX_CONTRIBUTION_BYTES,
    MAX_FRAGMENTS,
    MAX_MESSAGE_BYTES,
    MAX_PROOF_BYTES,
)
from deltapost.serialization.documents import (
    FORMAT,
    Counter,
    Digest,
    Document,
    Id,
    Metrics,
    ObjectRef,
    PublicKey,
    StepSeconds,
    decode_plain,
    encode_canonical,
)
from deltapost.serialization.signing import SigningKey, verify
from deltapost.serialization.verdicts import Verdict

Fragment = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]


class ContributionMessage(Document):
    """A learner's delta of `fragment`, computed against version `version` of its anchor, is in the bucket.

    Counters, loss and metrics are the learner's claims. Equal arguments give equal bytes.
    """

    kind: Literal["contribution"] = "contribution"
    run: Id
    learner: Id
    fragment: Fragment
    version: Counter
    payload: ObjectRef
    local_step: Counter
    steps: Counter
    tokens: Counter
    step_seconds: StepSeconds
    loss: float | None = None
    metrics: Metrics = Field(default_factory=dict)
    final: bool = False


class _Member(Document):
    run: Id
    learner: Id
    session: Counter
    counter: Counter


class JoinMessage(_Member):
    """A learner is there, with a session number above all it used before."""

    kind: Literal["join"] = "join"


class AliveMessage(_Member):
    """The learner still is there, at this local step; `waiting` while it stands at a barrier."""

    kind: Literal["alive"] = "alive"
    local_step: Counter
    waiting: bool = False


class LeaveMessage(_Member):
    """The learner ended in order: nobody need wait for it."""

    kind: Literal["leave"] = "leave"


class PassMessage(_Member):
    """The learner will not contribute to the fragment's round with this base version."""

    kind: Literal["pass"] = "pass"
    fragment: Fragment
    version: Counter


class Proof(Document):
    """A record's and its attestation's bytes, as the bucket holds them: nothing until they are checked."""

    record: Annotated[bytes, Field(max_length=MAX_PROOF_BYTES)]
    attestation: Annotated[bytes, Field(max_length=MAX_PROOF_BYTES)]

    @property
    def size(self) -> int:
        return len(self.record) + len(self.attestation)


class CommitMessage(Document):
    """A round is committed: the record of `version` is in the bucket, with this hash.

    `proof` saves readers two requests to the bucket; it is left out where it is too large.
    """

    kind: Literal["commit"] = "commit"
    run: Id
    fragment: Fragment
    version: Counter
    record: Digest
    proof: Proof | None = None


class AdviceMessage(Document):
    """What the owner decided of an envelope, before a record carries it: advice, not yet final."""

    kind: Literal["advice"] = "advice"
    run: Id
    fragment: Fragment
    version: Counter
    learner: Id
    envelope: Digest
    verdict: Verdict


class RunMessage(Document):
    """There is a run with this manifest. The signer's key is inside: the manifest itself is the proof."""

    kind: Literal["run"] = "run"
    run: Id
    manifest: Digest
    public_key: PublicKey


Message: TypeAlias = (
    ContributionMessage
    | JoinMessage
    | AliveMessage
    | LeaveMessage
    | PassMessage
    | CommitMessage
    | AdviceMessage
    | RunMessage
)
MemberMessage: TypeAlias = JoinMessage | AliveMessage | LeaveMessage | PassMessage

_KINDS: Final[dict[str, type[Document]]] = {
    model.model_fields["kind"].default: model for model in get_args(Message)
}


@dataclass(frozen=True)
class SignedMessage:
    """A message as it travelled: the value, the exact bytes that are signed, and the whole frame."""

    message: Message
    body: bytes
    signature: bytes
    frame: bytes
    #: Keys whose holder is known to have signed it.
    _signers: set[bytes] = field(default_factory=set, init=False, repr=False, compare=False)

    @cached_property
    def sha256(self) -> bytes:
        """The envelope's hash: what identifies it, however often it is delivered."""
        return hashlib.sha256(self.frame).digest()

    def verify(self, public_key: bytes, *, who: str) -> None:
        """Raises SignatureRefused unless the holder of `public_key` signed exactly these bytes."""
        if public_key not in self._signers:
            verify(public_key, "message", self.body, self.signature, who=who)
            self._signers.add(public_key)


def sign_message(message: Message, key: SigningKey) -> SignedMessage:
    """Frames and signs. Raises MalformedMessage when the frame would pass its size limit."""
    body = message.to_bytes()
    signature = key.sign("message", body)
    frame = encode_canonical([FORMAT, body, signature])
    _check_size(message.kind, len(frame))
    return SignedMessage(message, body, signature, frame)


def read_message(frame: bytes) -> SignedMessage:
    """Reads a frame; the signature is not checked yet. Raises MalformedMessage for anything else."""
    parts = decode_plain(frame, what="message", limit=MAX_MESSAGE_BYTES)
    match parts:
        case (int() as version, bytes() as body, bytes() as signature) if type(version) is int:
            if version != FORMAT:
                raise MalformedMessage(f"message format {version}: this release reads format {FORMAT}")
        case _:
            raise MalformedMessage("a message is an array of format, body and signature")
    if len(signature) != 64:
        raise MalformedMessage(f"a message's signature has 64 bytes, not {len(signature)}")
    if encode_canonical([version, body, signature]) != frame:
        raise MalformedMessage("the frame is not in canonical form")
    plain = decode_plain(body, what="message body", limit=MAX_MESSAGE_BYTES)
    kind = plain.get("kind") if isinstance(plain, dict) else None
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise MalformedMessage(f"message kind {kind!r:.40} is not one of {', '.join(_KINDS)}")
    _check_size(str(kind), len(frame))
    message: Message = model.from_plain(plain, body)  # type: ignore[assignment]
    return SignedMessage(message, body, signature, frame)


def _check_size(kind: str, size: int) -> None:
    limit = MAX_CONTRIBUTION_BYTES if kind == "contribution" else MAX_MESSAGE_BYTES
    if size > limit:
        raise MalformedMessage(
            f"a {kind} message of {size} bytes: at most {limit} are allowed", hint="send fewer metrics"
        )
