"""FetchedAhead: a batch's payloads on their way while the ones before them are judged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from deltapost.serialization.messages import ContributionMessage, SignedMessage
from deltapost.serialization.names import delta_key
from deltapost_aggregator.transfers import Fetched, Result, Transfers


class FetchedAhead:
    """Fetches payloads in the order of a batch, `ahead` at a time. Used by one thread.

    Of each learner only the next one: whether its later ones are needed shows when that is judged.
    """

    def __init__(self, transfers: Transfers, ahead: int) -> None:
        self._transfers = transfers
        self._most = ahead if transfers.side_by_side else 0
        self._wanted: Iterator[SignedMessage] = iter(())
        self._learners: set[str] = set()
        self._started: dict[bytes, Result[Fetched]] = {}

    def begin(self, wanted: Iterator[SignedMessage]) -> None:
        """The envelopes of the next batch whose payloads are needed, as far as is known when each is reached.

        What is under way of the batch before stays so: the same envelopes may come again.
        """
        self._wanted = wanted
        self._learners = set()
        while len(self._started) > self._most:
            del self._started[next(iter(self._started))]
        self._start()

    def take(self, signed: SignedMessage) -> Fetched:
        """The envelope's payload, as `Transfers.fetch` has it."""
        result = self._started.pop(signed.sha256, None)
        self._start()
        if result is not None:
            return result()
        message = _message(signed)
        return self._transfers.fetch(payload_key(message), message.payload)

    def _start(self) -> None:
        while len(self._started) < self._most and (signed := next(self._wanted, None)) is not None:
            message = _message(signed)
            if message.learner in self._learners or signed.sha256 in self._started:
                continue
            self._learners.add(message.learner)
            fetch = partial(self._transfers.fetch, payload_key(message), message.payload)
            self._started[signed.sha256] = self._transfers.start(fetch)


def payload_key(message: ContributionMessage) -> str:
    """Where the envelope says that its payload lies."""
    return delta_key(message.run, message.learner, message.fragment, message.version, message.payload.sha256)


def _message(signed: SignedMessage) -> ContributionMessage:
    assert isinstance(signed.message, ContributionMessage)
    return signed.message
