"""Intake: entries of a fragment's stream become verdicts, written together with the new stream position.

An entry is judged from the cheapest fact to the dearest: size and format, signature, repetition, version,
counters, slot, then the payload itself. Whatever a sender does, it ends in a decision about that sender's
envelope. A store that does not answer is no verdict: what was decided before it is kept, the rest waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deltapost.algorithms.sealing import (
    Decision,
    Judged,
    NeedsPayload,
    NeedsProbe,
    OpenRound,
    Repeated,
    Uncounted,
)
from deltapost.errors import (
    DeltapostError,
    MalformedMessage,
    ObjectMissing,
    StoreError,
)
from deltapost.events import events
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger.leases import Lease
from deltapost.ledger.runs import Standing
from deltapost.serialization.messages import ContributionMessage, SignedMessage, read_message
from deltapost.serialization.names import record_key
from deltapost.streams import Entry
from deltapost_aggregator.cache import PayloadCache
from deltapost_aggregator.caution import Caution
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.payloads import PayloadChecks
from deltapost_aggregator.policy import Policy

logger = events(__name__)


#: Seconds after which what is judged of a batch is written: verdicts do not wait for many slow payloads.
BATCH_SECONDS = 2.0


@dataclass(frozen=True)
class Taken:
    """What a batch led to. `record_ahead`: the record of head + 1 exists, adopt it before reading on."""

    decisions: Sequence[Decision]
    record_ahead: bool = False
    failure: DeltapostError | None = None


class Intake:
    """Judges the entries of one fragment's stream."""

    def __init__(self, context: RunContext, fragment: int, cache: PayloadCache) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._payloads = PayloadChecks(context, fragment, cache)
        self._caution = Caution(context, fragment)
        self._max_bytes = context.plan.max_payload_bytes(fragment)
        self._without_key: frozenset[str] = frozenset()
        #: The open round as the last batch left it, and where.
        self._kept: tuple[Lease, Standing, OpenRound] | None = None

    @property
    def limit(self) -> int:
        """How many entries to read for the next `take`."""
        return self._caution.limit

    def begin(self, lease: Lease) -> None:
        """The fragment was taken over."""
        self._caution.begin(lease)

    def open_round(self, lease: Lease, standing: Standing) -> OpenRound:
        """What is decided of the round that is open at `standing`: as the last `take` left it, or read anew.

        Nobody else can have changed it: whoever does moves the token, the head, the epoch or the position.
        """
        if self._kept is not None and self._kept[:2] == (lease, standing):
            return self._kept[2]
        return ledger_intake.open_round(self._services.ledger, lease.run, lease.fragment, standing.head)

    def forget(self) -> None:
        """Nothing waits: the open round is read anew from now on, until entries come."""
        self._kept = None

    def take(
        self,
        lease: Lease,
        before: Standing,
        entries: Sequence[Entry],
        policy: Policy,
        hold_lease: Callable[[], object],
    ) -> Taken:
        """Judges entries in order until the round is full, and writes what it decided.

        `hold_lease` is called between entries: it renews the lease when that is due. Raises LeaseLost
        when the fragment moved on meanwhile.
        """
        with self._caution.reading(lease, entries, hold_lease):
            return self._take(lease, before, entries, policy, hold_lease)

    def _take(
        self,
        lease: Lease,
        before: Standing,
        entries: Sequence[Entry],
        policy: Policy,
        hold_lease: Callable[[], object],
    ) -> Taken:
        ledger, reach = self._services.ledger, self._services.reach
        read = [self._read(entry) for entry in entries]
        envelopes = [item for item in read if isinstance(item, SignedMessage)]
        self._without_key = self._context.keys.without_key({_learner(signed) for signed in envelopes})
        view = self.open_round(lease, before)
        self._kept = None
        view.meets(ledger_intake.answered(ledger, lease.run, [signed.sha256 for signed in envelopes]))
        self._context.keys.check_ahead(
            [
                (signed, _learner(signed), _judged_at(signed, view))
                for signed in envelopes
                if signed.sha256 not in view.known and _learner(signed) not in self._without_key
            ]
        )
        self._payloads.begin(envelopes, partial(self._will_be_fetched, view))
        decisions: list[Decision] = []
        record_ahead = False
        failure: DeltapostError | None = None
        until = self._services.monotonic() + BATCH_SECONDS
        for entry, item in zip(entries, read, strict=True):
            try:
                hold_lease()
                decision = item if isinstance(item, Uncounted) else self._judge(entry, item, view)
            except DeltapostError as error:
                if not error.retryable and not isinstance(error, StoreError):
                    raise
                failure = error
                break
            if decision is None:
                record_ahead = True
                break
            decisions.append(decision)
            view.add(decision)
            self._log(decision)
            if policy.full(view, entry.id) or self._services.monotonic() >= until:
                break
        if decisions:
            reach("intake.tx_sent")
            ledger_intake.record(ledger, lease, before, decisions[-1].entry_id, decisions)
            reach("intake.tx_done")
            before = replace(before, position=decisions[-1].entry_id)
        self._kept = (lease, before, view)
        return Taken(decisions, record_ahead, failure)

    def _read(self, entry: Entry) -> SignedMessage | Uncounted:
        if self._caution.skips(entry):
            return Uncounted(entry.id, "malformed", detail="an entry that ended the starts of its readers")
        if entry.data is None:
            return Uncounted(entry.id, "malformed", detail="an entry without a message")
        try:
            signed = read_message(entry.data)
        except MalformedMessage as error:
            return Uncounted(entry.id, "malformed", detail=str(error))
        message = signed.message
        if not isinstance(message, ContributionMessage):
            return Uncounted(entry.id, "malformed", detail=f"a {message.kind} message is no envelope")
        if (message.run, message.fragment) != (self._context.run, self._fragment):
            return Uncounted(
                entry.id,
                "malformed",
                detail=f"an envelope of fragment {message.fragment} of run {message.run!r}",
            )
        return signed

    def _judge(self, entry: Entry, signed: SignedMessage, view: OpenRound) -> Decision | None:
        """The decision, or None when a record of head + 1 exists that must be adopted first."""
        message = signed.message
        assert isinstance(message, ContributionMessage)
        if message.learner in self._without_key:
            return Uncounted(entry.id, "unknown_learner", detail=f"no key for {message.learner!r}")
        if signed.sha256 not in view.known:  # else these very bytes, signature and all, were verified before
            refused = self._context.keys.refusal(signed, message.learner, _judged_at(signed, view))
            if refused is not None:
                return Uncounted(entry.id, refused.reason, detail=refused.detail)
            # Once for each envelope: a copy, by its learner's timer or by anybody, shows no sign of life.
            self._context.contributed(message.learner)
        found = self._without_store(entry.id, signed, view)
        match found:
            case NeedsProbe():
                self._services.reach("probe.before_ahead")
                if self._record_exists(view.head + 1):
                    return None
                return Judged(entry.id, signed, "ahead", f"the fragment is at version {view.head}")
            case NeedsPayload():
                verdict, detail = self._payloads.check(signed)
                self._services.reach("intake.payload_checked")
                return Judged(entry.id, signed, verdict, detail)
        return found

    def _without_store(
        self, entry_id: str, signed: SignedMessage, view: OpenRound
    ) -> Decision | NeedsProbe | NeedsPayload:
        plan = self._context.plan
        return view.judge(
            entry_id,
            signed,
            plan.config,
            max_payload_bytes=self._max_bytes,
            max_posted_bytes=plan.max_posted_bytes(self._fragment),
            redecide=self._payloads.may_redecide(signed.sha256),
        )

    def _will_be_fetched(self, view: OpenRound, signed: SignedMessage) -> bool:
        """Whether an envelope further on in the batch will need its payload, as far as can be said now."""
        message = signed.message
        assert isinstance(message, ContributionMessage)
        learner, keys = message.learner, self._context.keys
        if learner in self._without_key or not keys.may_count(signed, learner, _judged_at(signed, view)):
            return False
        return isinstance(self._without_store("", signed, view), NeedsPayload)

    def _record_exists(self, version: int) -> bool:
        try:
            self._services.store.head(record_key(self._context.run, self._fragment, version))
        except ObjectMissing:
            return False
        return True

    def _log(self, decision: Decision) -> None:
        if (
            isinstance(decision, Judged)
            and decision.verdict == "accepted"
            and not logger.isEnabledFor(logging.DEBUG)
        ):
            return  # most are
        fields: dict[str, object] = {"run": self._context.run, "fragment": self._fragment}
        match decision:
            case Judged():
                fields |= {
                    "learner": decision.message.learner,
                    "version": decision.message.version,
                    "envelope": decision.signed.sha256.hex(),
                    "verdict": decision.verdict,
                    "detail": decision.detail,
                }
                logger.log(
                    logging.DEBUG if decision.verdict == "accepted" else logging.INFO,
                    "envelope_decided",
                    extra=fields,
                )
            case Repeated():
                logger.debug("envelope_repeated", extra=fields)
            case Uncounted():
                fields |= {"reason": decision.reason, "detail": decision.detail}
                logger.info("envelope_unverified", extra=fields)


def _learner(signed: SignedMessage) -> str:
    assert isinstance(signed.message, ContributionMessage)
    return signed.message.learner


def _judged_at(signed: SignedMessage, view: OpenRound) -> int:
    """The version whose keys count. What came too late is judged as of now: a key that was replaced cannot
    use up its learner's quota.
    """
    assert isinstance(signed.message, ContributionMessage)
    return max(signed.message.version, view.head)
