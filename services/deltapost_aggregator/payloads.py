"""Payloads: fetched and hashed once, several at a time, and kept in the spool until their round is closed.

What the store answers is a verdict only where it is definite: no object, twice, a second apart; or one object
that fails for a minute while another is served. A store that does not answer at all is no verdict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltapost.algorithms.admission import check_payload, delta_norm, judge_norm
from deltapost.errors import (
    MalformedPayload,
    NonFinite,
    ObjectMissing,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
)
from deltapost.limits import (
    FAILING_OBJECT_SECONDS,
    LONGEST_REDECIDE_SECONDS,
    MISSING_RECHECK_SECONDS,
    REDECIDE_SECONDS,
)
from deltapost.serialization.messages import ContributionMessage, SignedMessage
from deltapost.serialization.tensor import Buffer
from deltapost.serialization.verdicts import Verdict
from deltapost_aggregator.cache import PayloadCache
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.failing import FailingObjects
from deltapost_aggregator.fetching import FetchedAhead, payload_key
from deltapost_aggregator.transfers import Fetched

#: Envelopes whose times are remembered; the oldest are forgotten first, which only costs a second look.
MAX_REMEMBERED = 4_096


class _Times:
    """When something happened to an envelope, or to a learner; bounded."""

    def __init__(self) -> None:
        self._times: OrderedDict[bytes, float] = OrderedDict()

    def get(self, envelope: bytes) -> float | None:
        return self._times.get(envelope)

    def first(self, envelope: bytes, now: float) -> float:
        """The time noted before, else `now`, noted."""
        return self._times[envelope] if envelope in self._times else self.note(envelope, now)

    def note(self, envelope: bytes, now: float) -> float:
        self._times[envelope] = now
        self._times.move_to_end(envelope)
        while len(self._times) > MAX_REMEMBERED:
            self._times.popitem(last=False)
        return now

    def forget(self, envelope: bytes) -> None:
        self._times.pop(envelope, None)


@dataclass(frozen=True)
class _Decided:
    """When a `missing` or `corrupt` was decided, and how many seconds it stands."""

    at: float
    pause: float


class PayloadChecks:
    """Checks the payloads of one fragment's envelopes, batch by batch. Used by one worker thread."""

    def __init__(self, context: RunContext, fragment: int, cache: PayloadCache) -> None:
        self._context = context
        self._services = context.services
        self._specs = context.plan.specs(fragment)
        self._cache = cache
        self._batch: Sequence[SignedMessage] = ()
        self._needed: Callable[[SignedMessage], bool] = lambda _signed: False
        self._ahead = FetchedAhead(context.services.transfers, context.services.settings.transfer_threads)
        self._absent_since = _Times()
        self._failing = FailingObjects(context.services.store, context.run, context.services.monotonic)
        self._gave_up = _Times()
        self._decided: OrderedDict[bytes, _Decided] = OrderedDict()

    def begin(self, batch: Sequence[SignedMessage], needed: Callable[[SignedMessage], bool]) -> None:
        """The envelopes of the next batch; `needed` tells of one whether its payload will be fetched."""
        self._batch = batch
        self._needed = needed
        self._ahead.begin(signed for signed in batch if needed(signed))

    def may_redecide(self, envelope: bytes) -> bool:
        """Whether a `missing` or `corrupt` was decided long enough ago to look again.

        The pause doubles each time: whoever posts such an envelope for ever costs ever fewer requests.
        """
        decided = self._decided.get(envelope)
        return decided is None or self._services.monotonic() - decided.at >= decided.pause

    def _note_decided(self, envelope: bytes) -> None:
        before = self._decided.get(envelope)
        pause = REDECIDE_SECONDS if before is None else min(2 * before.pause, LONGEST_REDECIDE_SECONDS)
        self._decided[envelope] = _Decided(self._services.monotonic(), pause)
        self._decided.move_to_end(envelope)
        if len(self._decided) > MAX_REMEMBERED:
            self._decided.popitem(last=False)

    def check(self, signed: SignedMessage) -> tuple[Verdict, str]:
        """The verdict on a payload, and the facts behind it. Raises StoreUnavailable: none yet."""
        message = signed.message
        assert isinstance(message, ContributionMessage)
        payload = message.payload
        try:
            found = self._fetch(signed, message)
        except ObjectMissing:
            self._note_decided(signed.sha256)
            return "missing", "no object under the payload's key, asked twice"
        except StoreError as error:
            if not self._failing.failing(signed.sha256):
                self._look_at_the_rest(signed)  # so that failing objects fail side by side, not in turn
            if not self._fails_alone(signed):
                raise StoreUnavailable(f"a payload cannot be read yet: {error}") from error
            self._note_decided(signed.sha256)
            return (
                "missing",
                f"unreadable for {FAILING_OBJECT_SECONDS:.0f} s while others were served: {error}",
            )
        self._failing.forget(signed.sha256)
        if found.data is None:
            self._note_decided(signed.sha256)
            if found.size != payload.size:
                return "corrupt", f"{found.size} bytes in the bucket, {payload.size} announced"
            return "corrupt", "the bytes in the bucket have another SHA-256 than announced"
        return self._check_bytes(payload.sha256, found.data)

    def _check_bytes(self, sha256: bytes, data: Buffer) -> tuple[Verdict, str]:
        plan = self._context.plan
        try:
            entries = check_payload(data, self._specs, plan.delta_codec)
        except MalformedPayload as error:
            return "malformed", str(error)
        except SchemaMismatch as error:
            return "schema", str(error)
        except NonFinite as error:
            return "non_finite", str(error)
        norm = delta_norm(entries, self._specs, plan.delta_codec, self._services.backend)
        refused = judge_norm(norm, plan.config)
        if refused is not None:
            return refused, f"the delta's norm is {norm:g}"
        self._cache.put(sha256, data)
        return "accepted", ""

    def _fetch(self, signed: SignedMessage, message: ContributionMessage) -> Fetched:
        """The object, or ObjectMissing after two definite answers MISSING_RECHECK_SECONDS apart."""
        try:
            return self._ahead.take(signed)
        except ObjectMissing:
            now = self._services.monotonic()
            since = self._absent_since.first(signed.sha256, now)
            # One that was missing at two looks before needs no second one: it still is what it was.
            if now - since >= MISSING_RECHECK_SECONDS or signed.sha256 in self._decided:
                self._absent_since.forget(signed.sha256)
                raise
            self._look_at_the_rest(signed)
            self._services.sleep(MISSING_RECHECK_SECONDS)
        found = self._services.transfers.fetch(payload_key(message), message.payload)
        self._absent_since.forget(signed.sha256)
        return found

    def _look_at_the_rest(self, missing: SignedMessage) -> None:
        """First looks for the batch's other payloads, so that one wait serves them all."""
        for signed in self._batch:
            message = signed.message
            if signed.sha256 == missing.sha256 or not isinstance(message, ContributionMessage):
                continue
            if not self._needed(signed):
                continue
            try:
                self._services.store.head(payload_key(message))
            except ObjectMissing:
                self._absent_since.first(signed.sha256, self._services.monotonic())
            except StoreError:
                self._failing.note(signed.sha256)

    def _fails_alone(self, signed: SignedMessage) -> bool:
        """Whether this object has failed for a minute, and another is served right now.

        Once one has, the same learner's next ones are not waited for within the same time: one learner's
        objects hold up the others once, not once each.
        """
        now = self._services.monotonic()
        assert isinstance(signed.message, ContributionMessage)
        learner = signed.message.learner.encode()
        gave_up = self._gave_up.get(learner)
        just_before = gave_up is not None and now - gave_up < FAILING_OBJECT_SECONDS
        if not self._failing.alone(signed.sha256, seconds=0.0 if just_before else FAILING_OBJECT_SECONDS):
            return False
        self._failing.forget(signed.sha256)
        self._gave_up.note(learner, now)
        return True
