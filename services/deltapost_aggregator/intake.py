"""Intake: entries of a fragment's stream become verdicts, written together with the new stream position.

An entry is judged from the cheapest fact to the dearest: size and format, signature, repetition, version,
counters, slot, then the payload itself. Whatever a sender does, it ends in a decision about that sender's
envelope. A store that does not answer is no verdict: what was decided before it is kept, the rest waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    SignatureRefused,
)
from deltapost.events import events
from deltapost.ledger import intake as ledger_intake
from deltapost.ledger.leases import Lease
from deltapost.ledger.runs import Standing
from deltapost.serialization.messages import ContributionMessage, SignedMessage, read_message
from deltapost.serialization.names import record_key
from deltapost.streams import Entry
from deltapost_aggregator.cache import PayloadCache
from deltapost_aggregator.context import RunContext
from deltapost_aggregator.payloads import PayloadChecks
from deltapost_aggregator.policy import Policy

logger = events(__name__)


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
        self._max_bytes = context.plan.max_payload_bytes(fragment)

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
        ledger, reach = self._services.ledger, self._services.reach
        read = [self._read(entry) for entry in entries]
        envelopes = [item.sha256 for item in read if isinstance(item, SignedMessage)]
        view = ledger_intake.open_round(ledger, lease.run, lease.fragment, before.head, envelopes)
        self._payloads.begin([item for item in read if isinstance(item, SignedMessage)], view)
        decisions: list[Decision] = []
        record_ahead = False
        failure: DeltapostError | None = None
        for entry, item in zip(entries, read, strict=True):
            try:
                hold_lease()
                decision = item if isinstance(item, Uncounted) else self._judge(entry, item, view)
            except DeltapostError as error:
                if not error.retryable:
                    raise
                failure = error
                break
            if decision is None:
                record_ahead = True
                break
            decisions.append(decision)
            view.add(decision)
            self._log(decision)
            if policy.full(view, entry.id):
                break
        if decisions:
            reach("intake.tx_sent")
            ledger_intake.record(ledger, lease, before, decisions[-1].entry_id, decisions)
            reach("intake.tx_done")
        return Taken(decisions, record_ahead, failure)

    def _read(self, entry: Entry) -> SignedMessage | Uncounted:
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
        public_key = self._context.public_key(message.learner)
        if public_key is None:
            return Uncounted(entry.id, "unknown_learner", detail=f"no key for {message.learner!r}")
        try:
            signed.verify(public_key, who=f"learner {message.learner}")
        except SignatureRefused as error:
            return Uncounted(entry.id, "bad_signature", detail=str(error))
        self._context.contributed(message.learner)
        plan = self._context.plan
        found = view.judge(
            entry.id,
            signed,
            plan.config,
            max_payload_bytes=self._max_bytes,
            max_posted_bytes=plan.max_posted_bytes(self._fragment),
            redecide=self._payloads.may_redecide(signed.sha256),
        )
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

    def _record_exists(self, version: int) -> bool:
        try:
            self._services.store.head(record_key(self._context.run, self._fragment, version))
        except ObjectMissing:
            return False
        return True

    def _log(self, decision: Decision) -> None:
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
