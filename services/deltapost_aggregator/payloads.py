"""Payloads: fetched once, checked against their envelope, and kept in memory until their round is closed.

What the store answers is a verdict only where it is definite: no object, twice, a second apart; or one object
that fails for a minute while another is served. A store that does not answer at all is no verdict.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from deltapost.algorithms.admission import check_payload, delta_norm, judge_norm
from deltapost.algorithms.sealing import OpenRound
from deltapost.errors import (
    MalformedPayload,
    NonFinite,
    ObjectMissing,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
)
from deltapost.limits import FAILING_OBJECT_SECONDS, MISSING_RECHECK_SECONDS, REDECIDE_SECONDS
from deltapost.serialization.messages import ContributionMessage, SignedMessage
from deltapost.serialization.names import delta_key, manifest_key
from deltapost.serialization.verdicts import Verdict
from deltapost.stores import Blob
from deltapost_aggregator.cache import PayloadCache
from deltapost_aggregator.context import RunContext

#: Envelopes whose times are remembered; the oldest are forgotten first, which only costs a second look.
MAX_REMEMBERED = 4_096


class _Times:
    """When something first happened to an envelope; bounded."""

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


class PayloadChecks:
    """Checks the payloads of one fragment's envelopes, batch by batch. Used by one worker thread."""

    def __init__(self, context: RunContext, fragment: int, cache: PayloadCache) -> None:
        self._context = context
        self._services = context.services
        self._specs = context.plan.specs(fragment)
        self._cache = cache
        self._batch: list[SignedMessage] = []
        self._absent_since = _Times()
        self._failing_since = _Times()
        self._decided_at = _Times()

    def begin(self, batch: Sequence[SignedMessage], view: OpenRound) -> None:
        """The envelopes of the next batch that may need their payload."""
        self._batch = [
            signed
            for signed in batch
            if isinstance(signed.message, ContributionMessage) and signed.message.version == view.head
        ]

    def may_redecide(self, envelope: bytes) -> bool:
        """Whether a `missing` or `corrupt` was decided long enough ago to look again."""
        decided = self._decided_at.get(envelope)
        return decided is None or self._services.monotonic() - decided >= REDECIDE_SECONDS

    def check(self, signed: SignedMessage) -> tuple[Verdict, str]:
        """The verdict on a payload, and the facts behind it. Raises StoreUnavailable: none yet."""
        message = signed.message
        assert isinstance(message, ContributionMessage)
        payload = message.payload
        try:
            blob = self._fetch(signed, message)
        except ObjectMissing:
            self._decided_at.note(signed.sha256, self._services.monotonic())
            return "missing", "no object under the payload's key, asked twice"
        except StoreError as error:
            if self._failing_since.get(signed.sha256) is None:
                self._look_at_the_rest(signed)  # so that failing objects fail side by side, not in turn
            if not self._fails_alone(signed):
                raise StoreUnavailable(f"a payload cannot be read yet: {error}") from error
            self._decided_at.note(signed.sha256, self._services.monotonic())
            return (
                "missing",
                f"unreadable for {FAILING_OBJECT_SECONDS:.0f} s while others were served: {error}",
            )
        self._failing_since.forget(signed.sha256)
        if blob.size != payload.size:
            self._decided_at.note(signed.sha256, self._services.monotonic())
            return "corrupt", f"{blob.size} bytes in the bucket, {payload.size} announced"
        if hashlib.sha256(blob.data).digest() != payload.sha256:
            self._decided_at.note(signed.sha256, self._services.monotonic())
            return "corrupt", "the bytes in the bucket have another SHA-256 than announced"
        return self._check_bytes(payload.sha256, blob.data)

    def _check_bytes(self, sha256: bytes, data: bytes) -> tuple[Verdict, str]:
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

    def _fetch(self, signed: SignedMessage, message: ContributionMessage) -> Blob:
        """The object, or ObjectMissing after two definite answers MISSING_RECHECK_SECONDS apart."""
        key = _key(message)
        length = message.payload.size + 1
        try:
            return self._services.store.get(key, length=length)
        except ObjectMissing:
            now = self._services.monotonic()
            since = self._absent_since.first(signed.sha256, now)
            if now - since >= MISSING_RECHECK_SECONDS:
                self._absent_since.forget(signed.sha256)
                raise
            self._look_at_the_rest(signed)
            self._services.sleep(MISSING_RECHECK_SECONDS)
        blob = self._services.store.get(key, length=length)
        self._absent_since.forget(signed.sha256)
        return blob

    def _look_at_the_rest(self, missing: SignedMessage) -> None:
        """First looks for the batch's other payloads, so that one wait serves them all."""
        for signed in self._batch:
            message = signed.message
            if signed.sha256 == missing.sha256 or not isinstance(message, ContributionMessage):
                continue
            try:
                self._services.store.head(_key(message))
            except ObjectMissing:
                self._absent_since.first(signed.sha256, self._services.monotonic())
            except StoreError:
                self._failing_since.first(signed.sha256, self._services.monotonic())

    def _fails_alone(self, signed: SignedMessage) -> bool:
        """Whether this object has failed for a minute, and another is served right now."""
        now = self._services.monotonic()
        if now - self._failing_since.first(signed.sha256, now) < FAILING_OBJECT_SECONDS:
            return False
        try:
            self._services.store.head(manifest_key(self._context.run))
        except StoreError:
            return False
        self._failing_since.forget(signed.sha256)
        return True


def _key(message: ContributionMessage) -> str:
    return delta_key(message.run, message.learner, message.fragment, message.version, message.payload.sha256)
