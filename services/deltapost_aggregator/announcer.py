"""Announcer: tells learners of commits and of provisional verdicts; trims behind what a record answered.

An announcement is a doorbell; where record and attestation are small, it brings them. Lost, it is rung again:
at the next start, and when the stream forgot it. Learners also look for the next record themselves; doubled,
they know the version already.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltapost.algorithms.sealing import Decision, Judged, Repeated
from deltapost.errors import StreamError
from deltapost.events import events
from deltapost.ledger import rounds
from deltapost.ledger.leases import Lease
from deltapost.ledger.rounds import Indexed
from deltapost.ledger.runs import Standing
from deltapost.ledger.seals import Sealed
from deltapost.limits import MAX_COMMITS_ENTRIES, MAX_PROOF_BYTES
from deltapost.serialization.ends import FragmentEnd
from deltapost.serialization.messages import (
    AdviceMessage,
    CommitMessage,
    ContributionMessage,
    Message,
    Proof,
    sign_message,
)
from deltapost.serialization.names import commits_stream, envelope_stream
from deltapost.streams import START, position_key
from deltapost_aggregator.context import RunContext

logger = events(__name__)


class Announcer:
    """Writes the run's commits stream for one fragment."""

    def __init__(self, context: RunContext, fragment: int) -> None:
        self._context = context
        self._services = context.services
        self._fragment = fragment
        self._stream = commits_stream(context.run)
        #: The highest id that the commits stream was seen to have.
        self._newest = START

    def announce(self, lease: Lease, standing: Standing, indexed: Indexed | None = None) -> None:
        """Announces the head if that has not been noted yet; `indexed` is what led to it, if just now."""
        if standing.announced < standing.head:
            fresh = indexed is not None and indexed.version == standing.head
            self._announce(lease, standing, indexed.documents if indexed and fresh else None)

    def remind(self, lease: Lease, standing: Standing) -> None:
        """Announces the head again if the stream was emptied, or is an older copy of itself."""
        bounds = self._services.log.bounds(self._stream)
        last_id = bounds.last_id if bounds is not None else START
        forgotten = bounds is None or position_key(last_id) < position_key(self._newest)
        self._newest = last_id
        if forgotten and standing.head > 0:
            logger.warning("announcements_lost", extra={"run": lease.run, "fragment": lease.fragment})
            self._announce(lease, standing)

    def _announce(
        self, lease: Lease, standing: Standing, documents: tuple[bytes, bytes] | None = None
    ) -> None:
        self._services.reach("announce.before")
        self._append(
            CommitMessage(
                run=lease.run,
                fragment=lease.fragment,
                version=standing.head,
                record=standing.head_sha256,
                proof=self._proof(standing, documents),
            )
        )
        self._services.reach("announce.sent")
        rounds.announced(self._services.ledger, lease, standing.head)

    def _proof(self, standing: Standing, documents: tuple[bytes, bytes] | None) -> Proof | None:
        """Record and attestation of the head, else as the ledger has them; None where they are too large."""
        if documents is None:
            ledger, run = self._services.ledger, self._context.run
            documents = rounds.documents_of(ledger, run, self._fragment, standing.head)
        if documents is None or sum(map(len, documents)) > MAX_PROOF_BYTES:
            return None
        return Proof(record=documents[0], attestation=documents[1])

    def announce_end(self, lease: Lease, end: FragmentEnd) -> None:
        """Rings for the end as for a commit. Lost, learners find it when they look for the next record."""
        try:
            self._append(
                CommitMessage(run=lease.run, fragment=lease.fragment, version=end.version, record=end.sha256)
            )
        except StreamError as error:
            logger.warning("end_not_announced", extra={"run": lease.run, "reason": str(error)})

    def advise(self, lease: Lease, decisions: Iterable[Decision]) -> None:
        """Tells learners of envelopes that were not accepted: at each delivery until a record says it.

        Best effort: advice that is lost is given again when the learner posts the envelope again.
        """
        refused = {
            decision.signed.sha256: decision
            for decision in decisions
            if isinstance(decision, Judged) or (isinstance(decision, Repeated) and decision.provisional)
        }
        try:
            for envelope, decision in refused.items():
                message = decision.signed.message
                if decision.verdict != "accepted" and isinstance(message, ContributionMessage):
                    self._append(
                        AdviceMessage(
                            run=lease.run,
                            fragment=lease.fragment,
                            version=message.version,
                            learner=message.learner,
                            envelope=envelope,
                            verdict=decision.verdict,
                        )
                    )
        except StreamError as error:
            logger.warning(
                "advice_not_sent",
                extra={"run": lease.run, "fragment": lease.fragment, "reason": str(error)},
            )

    def trim(self, standing: Standing, sealed: Sealed) -> None:
        """Removes the entries through a seal whose record is indexed, if the stream epoch is the seal's."""
        self._services.reach("trim.before")
        if sealed.stream_epoch != standing.stream_epoch:
            return
        stream = envelope_stream(self._context.run, self._fragment)
        if self._services.log.epoch(stream) == sealed.stream_epoch:
            self._services.log.trim(stream, sealed.position)

    def _append(self, message: Message) -> None:
        frame = sign_message(message, self._services.key).frame
        self._newest = self._services.log.append(self._stream, frame, max_length=MAX_COMMITS_ENTRIES)
