"""Which envelopes a round takes, and when it may be sealed: pure decisions over what was read.

*Who* is a fold over the stream: `OpenRound.judge` gives each envelope its verdict from the ones before it.
*When* is a policy over counts, liveness and the clock: `readiness`. The seal then fixes both, and
`seal_content` writes it down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from deltapost.algorithms import RoundResult
from deltapost.algorithms.admission import judge_counters
from deltapost.algorithms.diloco import DiLoCo
from deltapost.limits import MAX_ENVELOPES_PER_VERSION, MAX_LISTED_BYTES
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import ContributionMessage, SignedMessage
from deltapost.serialization.records import Answer, Claim, Manifest, MergedClaim, Record, SealContent
from deltapost.serialization.verdicts import REDECIDED, UnverifiedReason, Verdict


@dataclass(frozen=True)
class Judged:
    """An envelope with its verdict; `detail` tells the facts behind it in words."""

    entry_id: str
    signed: SignedMessage
    verdict: Verdict
    detail: str = ""

    @property
    def message(self) -> ContributionMessage:
        assert isinstance(self.signed.message, ContributionMessage)
        return self.signed.message


@dataclass(frozen=True)
class Repeated:
    """The envelope has its verdict already: this delivery is only counted.

    `provisional`: no record carries the verdict yet, so its learner may not know it.
    """

    entry_id: str
    signed: SignedMessage
    verdict: Verdict
    provisional: bool


@dataclass(frozen=True)
class Uncounted:
    """An entry that is counted by reason only; `learner` is set for `over_quota` alone."""

    entry_id: str
    reason: UnverifiedReason
    learner: str = ""
    detail: str = ""


Decision: TypeAlias = Judged | Repeated | Uncounted


@dataclass(frozen=True)
class NeedsProbe:
    """The base is above the head: `ahead`, unless the record of head + 1 turns out to exist."""


@dataclass(frozen=True)
class NeedsPayload:
    """Nothing speaks against the envelope itself: fetch and check what it announces."""


@dataclass
class OpenRound:
    """What is decided so far of a fragment's open round (version `head` to `head + 1`)."""

    head: int
    #: Verdicts by envelope: all of the run's envelopes that this batch may meet, answered or not.
    known: dict[bytes, Verdict] = field(default_factory=dict)
    #: Envelopes whose verdict a record or a seal holds: they are never decided again.
    fixed: set[bytes] = field(default_factory=set)
    #: The learners with an accepted contribution to this round.
    slots: dict[str, bytes] = field(default_factory=dict)
    #: Unanswered envelopes and their payloads' bytes by learner, for the quota.
    posted: dict[str, int] = field(default_factory=dict)
    posted_bytes: dict[str, int] = field(default_factory=dict)
    #: Bytes of the frames of all of them: what the round's record will have to hold.
    listed_bytes: int = 0

    def judge(
        self,
        entry_id: str,
        signed: SignedMessage,
        config: DiLoCo,
        *,
        max_payload_bytes: int,
        max_posted_bytes: int,
        redecide: bool,
    ) -> Decision | NeedsProbe | NeedsPayload:
        """The decision on a verified envelope, as far as it needs neither store nor payload.

        `redecide`: whether a `missing` or `corrupt` of before may be decided again at this delivery.
        """
        message = signed.message
        assert isinstance(message, ContributionMessage)
        envelope = signed.sha256
        earlier = self.known.get(envelope)
        fixed = envelope in self.fixed
        if earlier is not None and (fixed or not redecide or earlier not in REDECIDED):
            return Repeated(entry_id, signed, earlier, provisional=not fixed)
        if earlier is None and self._over_quota(message, len(signed.frame), max_posted_bytes):
            return Uncounted(entry_id, "over_quota", message.learner)
        if message.version > self.head:
            return NeedsProbe()
        if message.version < self.head:
            verdict: Verdict = "late" if message.version == self.head - 1 else "stale"
            return Judged(entry_id, signed, verdict, f"the fragment is at version {self.head}")
        refused = judge_counters(message.steps, message.tokens, config)
        if refused is not None:
            return Judged(
                entry_id, signed, refused, f"{message.steps} steps, {message.tokens} tokens claimed"
            )
        if message.payload.size > max_payload_bytes:
            return Judged(
                entry_id,
                signed,
                "too_large",
                f"{message.payload.size} bytes announced, at most {max_payload_bytes} fit the schema",
            )
        taken = self.slots.get(message.learner)
        if taken is not None:
            return Judged(entry_id, signed, "conflict", f"envelope {taken.hex()[:16]}… was accepted before")
        return NeedsPayload()

    def _over_quota(self, message: ContributionMessage, frame_bytes: int, max_posted_bytes: int) -> bool:
        room = MAX_LISTED_BYTES if message.learner not in self.posted else 2 * MAX_LISTED_BYTES // 3
        if self.listed_bytes + frame_bytes > room:
            return True
        bytes_after = self.posted_bytes.get(message.learner, 0) + message.payload.size
        return (
            self.posted.get(message.learner, 0) >= MAX_ENVELOPES_PER_VERSION or bytes_after > max_posted_bytes
        )

    def meets(self, answered: Mapping[bytes, Verdict]) -> None:
        """A batch begins: what records answered of its envelopes takes the place of the last batch's."""
        for envelope in self.fixed:
            self.known.pop(envelope, None)
        self.known.update(answered)
        self.fixed = set(answered)

    def post(self, learner: str, payload_bytes: int, frame_bytes: int) -> None:
        """Counts an unanswered envelope against its learner's quota, and the round's."""
        self.listed_bytes += frame_bytes
        self.posted[learner] = self.posted.get(learner, 0) + 1
        self.posted_bytes[learner] = self.posted_bytes.get(learner, 0) + payload_bytes

    def add(self, decision: Decision) -> None:
        """Takes a decision into account for the envelopes after it."""
        if isinstance(decision, Judged):
            envelope, learner = decision.signed.sha256, decision.message.learner
            if envelope not in self.known:
                self.post(learner, decision.message.payload.size, len(decision.signed.frame))
            self.known[envelope] = decision.verdict
            if decision.verdict == "accepted":
                self.slots[learner] = envelope


@dataclass(frozen=True)
class Ready:
    """Seal now. `degraded`: with fewer participants than the quorum."""

    degraded: bool


@dataclass(frozen=True)
class Waiting:
    """Not yet, and why, in words an operator can act on. `seconds`: when a look is due even without mail."""

    reason: str
    seconds: float | None = None


def counts_for_quorum(first_version: int, head: int) -> bool:
    """Whether a learner first seen at `first_version` counts for the quorum of the round with base `head`.

    At version 0 everyone does; a later one does from the version after that on, and is merged meanwhile.
    """
    return first_version == 0 or first_version < head


def readiness(
    *,
    accepted: Collection[str],
    newcomers: Collection[str] = (),
    passed: Collection[str],
    live: Collection[str] | None,
    config: DiLoCo,
    seconds_since_quorum: float | None,
    grace_seconds: float,
) -> Ready | Waiting:
    """Whether the open round may be sealed (design.md, "Ready to seal", "Grace", "Degraded").

    `accepted`, `newcomers` (those of them that do not count for the quorum yet), `passed` and `live` are
    learner ids; `live` is None while it is not known who is, as after a start: then only quorum and grace
    close a round. `seconds_since_quorum` is None until the quorum stood.
    """
    answered = set(accepted) | set(passed)
    all_reported = live is not None and set(live) <= answered
    counted = len(set(accepted) - set(newcomers))
    if not accepted:
        return Waiting("no accepted contribution yet")
    if counted >= config.quorum_size:
        left = grace_seconds - (seconds_since_quorum or 0.0)
        if all_reported or left <= 0:
            return Ready(degraded=False)
        return Waiting("the quorum stands; the grace window is open", left)
    if all_reported and len(accepted) >= config.min_quorum:
        return Ready(degraded=True)
    so_far = f"{counted} of {config.quorum_size} contributions"
    if counted < len(accepted):
        so_far += f" (and {len(accepted) - counted} of learners that are new at this version)"
    if live is None:
        return Waiting(f"{so_far}; who is live is not known yet")
    missing = sorted(set(live) - answered)
    if missing:
        more = " …" if len(missing) > 8 else ""
        return Waiting(f"{so_far}; waiting for {', '.join(missing[:8])}{more}")
    return Waiting(f"{so_far} and nobody else is live; at least {config.min_quorum} are needed")


def left_out_by(
    content: SealContent, verdicts: Mapping[bytes, Verdict], *, newcomers: Collection[str], quorum_size: int
) -> SealContent | None:
    """The next generation of a seal, without the claims that `verdicts` names; None when none is left."""
    claims = tuple(claim for claim in content.claims if claim.envelope not in verdicts)
    if not claims:
        return None
    answers = [
        Answer(
            envelope=claim.envelope,
            learner=claim.learner,
            version=content.version - 1,
            verdict=verdicts[claim.envelope],
        )
        for claim in content.claims
        if claim.envelope in verdicts
    ]
    return content.model_copy(
        update={
            "generation": content.generation + 1,
            "claims": claims,
            "answers": tuple(sorted([*content.answers, *answers], key=lambda answer: answer.envelope)),
            "degraded": _degraded(claims, newcomers, quorum_size),
        }
    )


def _degraded(claims: Sequence[Claim], newcomers: Collection[str], quorum_size: int) -> bool:
    return sum(claim.learner not in newcomers for claim in claims) < quorum_size


def seal_content(
    *,
    run: str,
    fragment: int,
    head: int,
    generation: int,
    rows: Sequence[tuple[SignedMessage, Verdict]],
    unverified: Mapping[UnverifiedReason, int],
    over_quota: Mapping[str, int],
    newcomers: Collection[str] = (),
    quorum_size: int,
) -> SealContent:
    """What the seal of the round from `head` to `head + 1` fixes, from the verdicts not answered yet."""
    claims = sorted(
        (Claim.of(signed) for signed, verdict in rows if verdict == "accepted"),
        key=lambda claim: claim.learner,
    )
    answers = sorted(
        (
            Answer(
                envelope=signed.sha256,
                learner=signed.message.learner,
                version=signed.message.version,
                verdict=verdict,
            )
            for signed, verdict in rows
            if verdict != "accepted" and isinstance(signed.message, ContributionMessage)
        ),
        key=lambda answer: answer.envelope,
    )
    return SealContent(
        run=run,
        fragment=fragment,
        version=head + 1,
        generation=generation,
        claims=tuple(claims),
        answers=tuple(answers),
        unverified=dict(unverified),
        over_quota=dict(over_quota),
        degraded=_degraded(claims, newcomers, quorum_size),
    )


def round_record(
    *,
    manifest: Manifest,
    manifest_sha256: bytes,
    seal: SealContent,
    previous: bytes,
    result: RoundResult,
    checkpoint: bool,
    anchor: ObjectRef,
    outer: ObjectRef,
    update: ObjectRef | None,
) -> Record:
    """The record that a seal and the closing of its round lead to. Equal inputs, equal bytes."""
    merged = {participant.learner: participant for participant in result.participants}
    return Record(
        arithmetic=manifest.arithmetic,
        run=seal.run,
        manifest=manifest_sha256,
        fragment=seal.fragment,
        version=seal.version,
        previous=previous,
        generation=seal.generation,
        degraded=seal.degraded,
        participants=tuple(
            MergedClaim(
                **claim.model_dump(exclude={"payload"}),
                payload=claim.payload,
                weight=merged[claim.learner].weight,
                norm=merged[claim.learner].norm,
                cosine=merged[claim.learner].cosine,
            )
            for claim in seal.claims
        ),
        cosine=result.cosine,
        answers=seal.answers,
        unverified=seal.unverified,
        over_quota=seal.over_quota,
        checkpoint=checkpoint,
        anchor=anchor,
        outer=outer,
        update=update,
    )
