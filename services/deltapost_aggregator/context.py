"""What the parts of an aggregator share: its connections, its health, and each run's plan and learners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from deltapost.adapters import Backend
from deltapost.algorithms.liveness import Liveness
from deltapost.algorithms.plan import RunPlan
from deltapost.algorithms.sealing import counts_for_quorum
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger
from deltapost.points import Reach, nothing
from deltapost.serialization.messages import MemberMessage, PassMessage
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore
from deltapost.streams import MessageLog
from deltapost_aggregator.cache import PayloadMemory
from deltapost_aggregator.garbage import NamedKeys
from deltapost_aggregator.keyring import Keyring
from deltapost_aggregator.settings import AggregatorSettings
from deltapost_aggregator.spool import Spool
from deltapost_aggregator.transfers import Transfers


class Health:
    """What is wrong right now, by component: empty means ready."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._held: dict[str, set[int]] = {}
        self.last_read = time.monotonic()

    def problem(self, component: str, reason: str) -> None:
        with self._lock:
            self._problems[component] = reason

    def fine(self, component: str) -> None:
        with self._lock:
            self._problems.pop(component, None)

    def read_happened(self) -> None:
        """A stream was read successfully just now."""
        self.last_read = time.monotonic()

    def waits(self, component: str, reason: str | None) -> None:
        """Why a round does not close yet, which may be as it should be; None: it closed."""
        with self._lock:
            if reason is None:
                self._waiting.pop(component, None)
            else:
                self._waiting[component] = reason

    def waiting(self) -> dict[str, str]:
        with self._lock:
            return dict(sorted(self._waiting.items()))

    def holds(self, run: str, fragment: int) -> None:
        """This process serves the fragment."""
        with self._lock:
            self._held.setdefault(run, set()).add(fragment)

    def dropped(self, run: str, fragment: int) -> None:
        """It no longer does."""
        with self._lock:
            self._held.get(run, set()).discard(fragment)

    def held(self) -> dict[str, list[int]]:
        """The fragments that this process serves, by run."""
        with self._lock:
            return {run: sorted(fragments) for run, fragments in sorted(self._held.items())}

    def problems(self) -> dict[str, str]:
        with self._lock:
            return dict(sorted(self._problems.items()))


@dataclass(frozen=True)
class Services:
    """An aggregator's connections and its sources of time, which tests replace."""

    settings: AggregatorSettings
    store: ObjectStore
    log: MessageLog
    ledger: Ledger
    key: SigningKey
    backend: Backend
    health: Health = field(default_factory=Health)
    reach: Reach = nothing
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    #: Held while an entry is read that may kill the process (see `caution`).
    suspect_read: threading.Lock = field(default_factory=threading.Lock)
    spool: Spool = field(default_factory=Spool)

    @cached_property
    def payloads(self) -> PayloadMemory:
        """The payloads that this process keeps between intake and close."""
        return PayloadMemory(self.settings.payload_cache_bytes)

    @cached_property
    def transfers(self) -> Transfers:
        """What fetches and writes this process's objects."""
        return Transfers(self.store, self.spool, self.settings.transfer_threads)


class RunContext:
    """One served run: its plan, its learners' keys (`keys`), and who is live. Shared by the run's workers."""

    def __init__(self, services: Services, plan: RunPlan) -> None:
        self.services = services
        self.plan = plan
        #: By fragment, the entry that this process noted before it read it, and has not cleared (`caution`).
        self.noted: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._liveness = Liveness(services.settings.learner_lease_seconds, plan.config.stall_after_seconds)
        self.keys = Keyring(services, plan)
        #: What the rounds that this process indexed name: garbage collection need not read them again.
        self.named = NamedKeys()
        self._first_versions: dict[str, int] = {}
        self._members_known = False
        #: Who is live, with the keys by which that was found; None once it may be another.
        self._live: tuple[tuple[int, int], frozenset[str]] | None = None
        self._changes = 0
        #: Set once the run's end marker is in the bucket: its threads stop.
        self.finished = False

    @property
    def changes(self) -> int:
        """Grows whenever who is live, or who has nothing to give to a round, is no longer what it was."""
        return self._changes

    @property
    def run(self) -> str:
        return self.plan.run

    def members(
        self, messages: Sequence[MemberMessage], listened: float, *, whole: bool
    ) -> list[MemberMessage]:
        """Takes in what one read of the members stream brought, at once; returns the messages that counted.

        `listened`: seconds since the read before. `whole`: nothing was left to read, so who is live is known.
        """
        with self._lock:
            self._live = None
            before = self._liveness.live() if self._members_known else None
            self._liveness.listened(listened)
            counted = [message for message in messages if self._liveness.observe(message)]
            self._members_known = whole
            after = self._liveness.live() if whole else None
            if before != after or any(isinstance(message, PassMessage) for message in counted):
                self._changes += 1
            return counted

    def members_unknown(self) -> None:
        """The members stream cannot be read: nobody expires, and nobody is known to be all there is."""
        with self._lock:
            self._members_known, self._live = False, None

    def live(self) -> frozenset[str] | None:
        """The live learners that have a key still; None while that is not known."""
        keys = self.keys.seen
        with self._lock:
            if self._live is not None and self._live[0] == keys:
                return self._live[1]
            live = self._liveness.live() if self._members_known else None
            if not live and not self._liveness.listened_a_lease:
                live = None  # after a start nobody may have spoken yet: that nobody is there takes a lease
            if live is None:
                return None
            live = frozenset(name for name in live if not self.keys.revoked(name))
            self._live = (keys, live)
            return live

    def passed(self, fragment: int, version: int) -> frozenset[str]:
        with self._lock:
            return self._liveness.passed(fragment, version)

    def contributed(self, learner: str) -> None:
        with self._lock:
            self._liveness.contributed(learner)
            if self._live is not None and learner not in self._live[1]:
                self._live = None  # it may be live again; one that is live stays so

    def counts(self, learner: str, head: int) -> bool:
        """Whether the learner counts for the quorum of the round with this base: not while it is new.

        At version 0 everyone counts; who came later counts from the version after that on.
        """
        if head == 0:
            return True
        with self._lock:
            first = self._first_versions.get(learner)
        if first is None:
            first = runs.first_version(self.services.ledger, self.run, learner)
            with self._lock:
                self._first_versions[learner] = first
        return counts_for_quorum(first, head)
