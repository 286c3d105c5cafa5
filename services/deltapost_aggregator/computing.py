"""Computing: the round that a seal fixes, closed in the spool: its record and its objects, nothing written.

It is a function of the seal's content, the state at the head and the payloads, all of them verified by hash:
whoever computes it, whenever, gets the same bytes. What cannot be computed says which contributions are to
be left out, by a fixed rule: those whose payload is lost, else the one with the largest norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.admission import delta_norm
from deltapost.algorithms.checkpoints import is_checkpoint
from deltapost.algorithms.sealing import round_record
from deltapost.audit.history import objects_of
from deltapost.errors import HistoryError, NonFinite, ObjectMissing, StoreError
from deltapost.ledger.runs import Standing
from deltapost.limits import MISSING_RECHECK_SECONDS
from deltapost.serialization import packed, unpack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import (
    anchor_key,
    delta_key,
    outer_key,
    update_key,
)
from deltapost.serialization.records import Claim, Record, SealContent
from deltapost.serialization.tensor import Buffer
from deltapost.serialization.verdicts import Verdict
from deltapost_aggregator.cache import PayloadCache
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.failing import FailingObjects
from deltapost_aggregator.recovering import Recovery, StillRecovering
from deltapost_aggregator.transfers import sha256_of

_KeyOf: TypeAlias = Callable[[str, int, int, bytes], str]


@dataclass(frozen=True)
class LeftOut:
    """The seal cannot be closed as it is: the next generation leaves these envelopes out, and why."""

    verdicts: Mapping[bytes, Verdict]
    reason: str


@dataclass(frozen=True)
class ClosedRound:
    """A closed round before anything is written: its record, the next state, and the objects by key."""

    record: Record
    state: FragmentState
    objects: list[tuple[str, Buffer]]


class RoundComputer:
    """Computes the rounds of one fragment. `remember` only saves reading the newest state back."""

    def __init__(self, context: RunContext, fragment: int, cache: PayloadCache) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._cache = cache
        self._aggregator = context.plan.aggregator(fragment, context.services.backend)
        self._state: tuple[bytes, FragmentState] | None = None
        self._recovery = Recovery(context, fragment, self._get_object, self.compute)
        #: Sealed envelopes whose payload is not readable.
        self._failing = FailingObjects(context.services.store, context.run, context.services.monotonic)

    def remember(self, closed: ClosedRound) -> None:
        """The round was committed: its state is the next one's start, its payloads are done with."""
        self._state = (closed.record.sha256, closed.state)
        self._cache.clear()

    def lost(self, content: SealContent, base: int) -> LeftOut | None:
        """The sealed contributions whose payload is gone for good; None when all are there.

        Gone is: twice a definite "no such object", a second apart; other bytes under the key; or one object
        failing for a minute while others are served. Raises what the store raises that does not answer.
        """
        verdicts, failure = self._look(content, base)
        if "missing" in verdicts.values():
            before = verdicts
            self._services.sleep(MISSING_RECHECK_SECONDS)
            again, failure = self._look(content, base)
            verdicts = {
                envelope: verdict
                for envelope, verdict in again.items()
                if verdict != "missing" or before.get(envelope) == "missing"
            }
        if failure is not None:
            raise failure
        if not verdicts:
            return None
        names = ", ".join(claim.learner for claim in content.claims if claim.envelope in verdicts)
        return LeftOut(verdicts, f"the payload of {names:.200} is lost")

    def _look(self, content: SealContent, base: int) -> tuple[dict[bytes, Verdict], StoreError | None]:
        """Which payloads are not as sealed, and what kept it from knowing of others."""
        verdicts: dict[bytes, Verdict] = {}
        failure: StoreError | None = None
        looks = [partial(self._look_at, claim, base) for claim in content.claims]
        for claim, error in zip(content.claims, self._services.transfers.each(looks), strict=True):
            match error:
                case ObjectMissing():
                    verdicts[claim.envelope] = "missing"
                case HistoryError():
                    verdicts[claim.envelope] = "corrupt"
                case StoreError() if self._failing.alone(claim.envelope):
                    verdicts[claim.envelope] = "missing"
                case StoreError():
                    failure = error
        return verdicts, failure

    def _look_at(self, claim: Claim, base: int) -> StoreError | HistoryError | None:
        try:
            self._cache.put(claim.payload.sha256, self.payload(claim, base))
        except (StoreError, HistoryError) as error:
            return error
        return None

    def largest(self, content: SealContent, base: int, error: NonFinite) -> LeftOut:
        """Who is left out of a round whose result is not finite: the largest delta, ties by learner id."""
        specs, codec = self._context.plan.specs(self._fragment), self._context.plan.delta_codec
        norms = [
            delta_norm(unpack(self.payload(claim, base)), specs, codec, self._services.backend)
            for claim in content.claims
        ]
        claim = content.claims[norms.index(max(norms))]
        return LeftOut(
            {claim.envelope: "non_finite"},
            f"the result is not finite ({error}); {claim.learner} has the largest norm",
        )

    def compute(self, before: Standing, content: SealContent) -> ClosedRound:
        """The round that a seal fixes, closed: its record and its objects. Writes nothing.

        Raises ObjectMissing or HistoryError when an input is not there, NonFinite when the result is none,
        StillRecovering after each round but the last that has to be closed again to know the state before.
        """
        run, fragment, base = self._context.run, self._fragment, before.head
        state = self._load_state(before)
        loads = [partial(self._load_contribution, claim, base) for claim in content.claims]
        contributions = list(self._services.transfers.each(loads))
        self._services.reach("close.inputs_fetched")
        result = self._aggregator.close_round(state, contributions)
        made: list[tuple[_KeyOf, Buffer]] = [
            (anchor_key, packed(result.state.theta)),
            (outer_key, packed(result.state.outer)),
        ]
        if result.update is not None:
            made.append((update_key, packed(result.update)))
        hashes = self._services.transfers.each([partial(sha256_of, data) for _, data in made])
        refs, objects = [], []
        for (key_of, data), sha256 in zip(made, hashes, strict=True):
            refs.append(ObjectRef(sha256=sha256, size=len(data)))
            objects.append((key_of(run, fragment, base, sha256), data))
        record = round_record(
            manifest=self._context.plan.manifest,
            manifest_sha256=self._context.plan.manifest_sha256,
            seal=content,
            previous=before.head_sha256,
            result=result,
            checkpoint=is_checkpoint(content.version, self._context.plan.config.checkpoint_every),
            anchor=refs[0],
            outer=refs[1],
            update=refs[2] if result.update is not None else None,
        )
        uploaded = objects_of(record)
        return ClosedRound(record, result.state, [one for one in objects if one[0] in uploaded])

    def payload(self, claim: Claim, base: int) -> Buffer:
        """The claim's payload, verified by its hash. Raises ObjectMissing, HistoryError."""
        data = self._cache.get(claim.payload.sha256)
        if data is None:
            key = delta_key(self._context.run, claim.learner, self._fragment, base, claim.payload.sha256)
            data = self._get_object(key, claim.payload)
        self._failing.forget(claim.envelope)
        return data

    def _load_contribution(self, claim: Claim, base: int) -> Contribution:
        return Contribution(
            claim.learner,
            claim.local_step,
            claim.steps,
            claim.tokens,
            step_seconds=claim.step_seconds,
            final=claim.final,
            tensors=unpack(self.payload(claim, base)),
        )

    def _load_state(self, before: Standing) -> FragmentState:
        """Anchor and outer state at the head: from memory, else from the newest checkpoint on."""
        if self._state is None or self._state[0] != before.head_sha256:
            self._state = self._recovery.start(before, self._state)
        if self._state[1].version < before.head:
            self._state = self._recovery.step(before, self._state)
        if self._state[1].version < before.head:
            raise StillRecovering(self._state[1].version, before.head)
        return self._state[1]

    def anchor(self, head: Standing) -> tuple[str, Buffer]:
        """The anchor at the head, which is above 0: its key and bytes. Raises as `compute` does."""
        data = packed(self._load_state(head).theta)
        return anchor_key(self._context.run, self._fragment, head.head - 1, sha256_of(data)), data

    def _get_object(self, key: str, ref: ObjectRef) -> Buffer:
        """The object's bytes, verified against the reference. Raises ObjectMissing, HistoryError."""
        found = self._services.transfers.fetch(key, ref)
        if found.data is None:
            raise HistoryError(
                f"the object {key!r} no longer has the bytes its record names "
                f"({found.size} bytes, expected {ref.size})",
                hint="restore the object from a copy of the bucket",
            )
        return found.data
