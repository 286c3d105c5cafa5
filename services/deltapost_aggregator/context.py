"""What the parts of an aggregator share: its connections, its health, and each run's plan and learners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from deltapost.adapters import Backend
from deltapost.algorithms.liveness import Liveness
from deltapost.algorithms.plan import RunPlan
from deltapost.algorithms.sealing import counts_for_quorum
from deltapost.errors import MalformedMessage, ObjectMissing, StoreError
from deltapost.events import events
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger
from deltapost.limits import FAILING_OBJECT_SECONDS
from deltapost.points import Reach, nothing
from deltapost.serialization.messages import MemberMessage
from deltapost.serialization.names import learner_key, learners_prefix, manifest_key
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore
from deltapost.streams import MessageLog
from deltapost_aggregator.cache import PayloadMemory
from deltapost_aggregator.settings import AggregatorSettings

logger = events(__name__)

#: Seconds for which a learner id without a key in the bucket is not asked for again.
UNKNOWN_LEARNER_SECONDS = 1.0
#: Ids remembered for that; a stranger can make up any number.
MAX_REMEMBERED_IDS = 10_000
#: Unknown ids of one batch whose keys are asked for one by one; beyond, one listing answers for all.
MAX_IDS_ASKED_FOR = 8
#: Ids of a listing that are looked at; with more in the bucket, keys are asked for one by one again.
MAX_IDS_LISTED = 100_000


class Health:
    """What is wrong right now, by component: empty means ready."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
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

    @cached_property
    def payloads(self) -> PayloadMemory:
        """The payloads that this process keeps between intake and close."""
        return PayloadMemory(self.settings.payload_cache_bytes)


class RunContext:
    """One served run: its plan, its learners' keys, and who is live. Shared by the run's workers."""

    def __init__(self, services: Services, plan: RunPlan) -> None:
        self.services = services
        self.plan = plan
        self._lock = threading.Lock()
        self._liveness = Liveness(services.settings.learner_lease_seconds, plan.config.stall_after_seconds)
        self._keys = runs.learner_keys(services.ledger, plan.run)
        self._first_versions: dict[str, int] = {}
        self._unknown_until: dict[str, float] = {}
        self._failing_since: dict[str, float] = {}
        self._members_known = False
        self._too_many_listed = False

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
            self._liveness.listened(listened)
            counted = [message for message in messages if self._liveness.observe(message)]
            self._members_known = whole
            return counted

    def members_unknown(self) -> None:
        """The members stream cannot be read: nobody expires, and nobody is known to be all there is."""
        with self._lock:
            self._members_known = False

    def live(self) -> frozenset[str] | None:
        """The live learners; None while that is not known."""
        with self._lock:
            live = self._liveness.live() if self._members_known else None
            # After a start nobody may have spoken yet: that nobody is there is known after a lease.
            return live if live or self._liveness.listened_a_lease else None

    def passed(self, fragment: int, version: int) -> frozenset[str]:
        with self._lock:
            return self._liveness.passed(fragment, version)

    def contributed(self, learner: str) -> None:
        with self._lock:
            self._liveness.contributed(learner)

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

    def public_key(self, learner: str) -> bytes | None:
        """The learner's key, from memory or the bucket; None for an id nobody has registered."""
        with self._lock:
            known = self._keys.get(learner)
            if known is not None:
                return known
            if self._unknown_until.get(learner, float("-inf")) > self.services.monotonic():
                return None
        try:
            data = self.services.store.get(learner_key(self.run, learner), length=33).data
            if len(data) != 32:
                raise MalformedMessage(f"the key object of learner {learner!r} has not 32 bytes")
        except ObjectMissing:
            self._no_key(learner)
            return None
        except StoreError:
            if not self._fails_alone(learner):
                raise
            logger.warning("learner_key_unreadable", extra={"run": self.run, "learner": learner})
            self._no_key(learner)
            return None
        except MalformedMessage as error:
            logger.warning("learner_key_malformed", extra={"run": self.run, "reason": str(error)})
            return None
        with self._lock:
            self._failing_since.pop(learner, None)
        runs.add_learner(self.services.ledger, self.run, learner, data)
        with self._lock:
            self._keys[learner] = data
        logger.info("learner_registered", extra={"run": self.run, "learner": learner})
        return data

    def without_key(self, learners: Collection[str]) -> frozenset[str]:
        """Those of a batch's learners that definitely have no key, where asking one by one would be many
        requests: a stranger can make up an id for each message. Call it after the batch was read.
        """
        with self._lock:
            unknown = {learner for learner in learners if learner not in self._keys}
        if len(unknown) <= MAX_IDS_ASKED_FOR or self._too_many_listed:
            return frozenset()
        prefix = learners_prefix(self.run)
        try:
            listed = self.services.store.list(prefix)
            found = {info.key.removeprefix(prefix) for info in islice(listed, MAX_IDS_LISTED + 1)}
        except StoreError:
            return frozenset()  # whoever asks for the single key says why
        self._too_many_listed = len(found) > MAX_IDS_LISTED
        return frozenset() if self._too_many_listed else frozenset(unknown - found)

    def knows(self, learner: str) -> bytes | None:
        """The learner's key, if it is in memory."""
        with self._lock:
            return self._keys.get(learner)

    def _no_key(self, learner: str) -> None:
        with self._lock:
            if len(self._unknown_until) > MAX_REMEMBERED_IDS:
                self._unknown_until.clear()
            self._unknown_until[learner] = self.services.monotonic() + UNKNOWN_LEARNER_SECONDS

    def _fails_alone(self, learner: str) -> bool:
        """Whether this key has been unreadable for a minute while the store serves the manifest."""
        now = self.services.monotonic()
        with self._lock:
            if len(self._failing_since) > MAX_REMEMBERED_IDS:
                self._failing_since.clear()
            since = self._failing_since.setdefault(learner, now)
        if now - since < FAILING_OBJECT_SECONDS:
            return False
        try:
            self.services.store.head(manifest_key(self.run))
        except StoreError:
            return False
        return True
