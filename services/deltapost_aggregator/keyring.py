"""Keyring: whose signature counts for a learner at a version, by the run's registry and `learners/ID`.

The registry is read on from the bucket every few seconds, and at once when a signature is in doubt; the
ledger keeps what was read. An entry that is not the creator's is never taken in: it shows in readiness, and
the keys known so far go on counting. "Unknown" is said only after the bucket said so.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from deltapost.adapters import kernels
from deltapost.algorithms.key_history import KeyHistory
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import (
    DeltapostError,
    ForkedHistory,
    MalformedMessage,
    ObjectMissing,
    SignatureRefused,
    StoreError,
)
from deltapost.events import events
from deltapost.ledger import registry, runs
from deltapost.limits import MAX_MESSAGE_BYTES, REGISTRY_POLL_SECONDS
from deltapost.serialization.messages import SignedMessage
from deltapost.serialization.names import learner_key, learners_prefix, registry_key
from deltapost.serialization.verdicts import UnverifiedReason
from deltapost.stores.registry import StoredEntry, entries_after
from deltapost_aggregator.failing import FailingObjects

if TYPE_CHECKING:
    from deltapost_aggregator.context import Services

logger = events(__name__)

#: Seconds for which "no such key" is believed: of an id without one, and of a registry without a next entry.
UNKNOWN_LEARNER_SECONDS = 1.0
#: Ids remembered for that; a stranger can make up any number.
MAX_REMEMBERED_IDS = 10_000
#: Unknown ids of one batch whose keys are asked for one by one; beyond, one listing answers for all.
MAX_IDS_ASKED_FOR = 8
#: Ids of a listing that are looked at; with more in the bucket, keys are asked for one by one again.
MAX_IDS_LISTED = 100_000
#: The fewest signatures that are worth a thread.
SIGNATURES_PER_THREAD = 16
#: Registry entries written to the ledger in one transaction.
BATCH_ENTRIES = 256


@dataclass(frozen=True)
class Refusal:
    """Why a message speaks for nobody: what it is counted as, and the facts in words."""

    reason: UnverifiedReason
    detail: str


class Keyring:
    """The keys of one run's learners. Shared by the run's threads."""

    def __init__(self, services: Services, plan: RunPlan) -> None:
        self._services = services
        self._plan = plan
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._history = self._load()
        noted = runs.learner_keys(services.ledger, plan.run)
        self._noted = set(noted)
        #: Keys in `learners/ID`; an id whose history starts with `add` had none.
        self._owners = {
            learner: key
            for learner, key in noted.items()
            if (first := self._history.entries(learner)[:1]) == () or first[0].action != "add"
        }
        self._unknown_until: dict[str, float] = {}
        self._failing = FailingObjects(services.store, plan.run, services.monotonic)
        self._read_at = self._look_at = float("-inf")
        self._compared = self._history.number == 0
        self._problem: str | None = None
        self._highest_head = 0
        self._too_many_listed = False

    def refusal(self, signed: SignedMessage, learner: str, version: int) -> Refusal | None:
        """None when a key that counts for the learner at this base version signed the message.

        Raises retryable errors while the bucket does not say who that is.
        """
        self._read_on_if_due()
        refused = self._judge(signed, learner, version)
        if refused is None or self._services.monotonic() - self._read_at < UNKNOWN_LEARNER_SECONDS:
            return refused
        self._read_on()
        return self._judge(signed, learner, version)

    def look(self) -> int:
        """Reads the registry on when that is due; returns the run's highest head, which judges members.

        A run without a registry needs none: 0.
        """
        self._read_on_if_due()
        if self._history.number:
            self._highest_head = registry.highest_head(self._services.ledger, self._plan.run)
        return self._highest_head

    def may_count(self, signed: SignedMessage, learner: str, version: int) -> bool:
        """Whether the message may turn out to be the learner's, as far as memory tells: asks nobody."""
        with self._lock:
            speakers, owner = self._history.speakers(learner, version), self._owners.get(learner)
        if speakers.owner and owner is None:
            return True
        return self._signed_by(
            signed, learner, [*([owner] if speakers.owner and owner else []), *speakers.keys]
        )

    def check_ahead(self, batch: Sequence[tuple[SignedMessage, str, int]]) -> None:
        """Checks the signatures of a batch of (message, learner, version) on all processors, as far as memory
        tells whose key counts: asked about them, `refusal` then only looks up what came out.
        """
        wanted: list[tuple[SignedMessage, str, bytes]] = []
        with self._lock:
            for signed, learner, version in batch:
                speakers, owner = self._history.speakers(learner, version), self._owners.get(learner)
                keys = [*([owner] if speakers.owner and owner else []), *speakers.keys]
                wanted += [(signed, learner, key) for key in keys[:1]]

        def work(_part: int, begin: int, end: int) -> None:
            for signed, learner, key in wanted[begin:end]:
                self._signed_by(signed, learner, [key])

        kernels.share(len(wanted), None, work, least=SIGNATURES_PER_THREAD)

    def without_key(self, learners: Collection[str]) -> frozenset[str]:
        """Those of a batch's learners that definitely have no key, where asking one by one would be many
        requests: a stranger can make up an id for each message. Call it after the batch was read.
        """
        if self._plan.manifest.admission != "open":
            return frozenset()  # the registry tells it without a request for each
        self._read_on_if_due()
        with self._lock:
            unknown = {
                name for name in learners if name not in self._owners and not self._history.entries(name)
            }
        if len(unknown) <= MAX_IDS_ASKED_FOR or self._too_many_listed:
            return frozenset()
        prefix = learners_prefix(self._plan.run)
        try:
            listed = self._services.store.list(prefix)
            found = {info.key.removeprefix(prefix) for info in islice(listed, MAX_IDS_LISTED + 1)}
        except StoreError:
            return frozenset()  # whoever asks for the single key says why
        self._too_many_listed = len(found) > MAX_IDS_LISTED
        return frozenset() if self._too_many_listed else frozenset(unknown - found)

    @property
    def seen(self) -> tuple[int, int]:
        """What `revoked` answers by: it grows when that may change."""
        with self._lock:
            return self._history.number, self._highest_head

    def revoked(self, learner: str) -> bool:
        """Whether nobody speaks for the learner any more, at the highest head that `look` saw."""
        with self._lock:
            entry = self._history.in_force(learner, self._highest_head)
        return entry is not None and entry.public_key is None

    def _judge(self, signed: SignedMessage, learner: str, version: int) -> Refusal | None:
        keys = self._keys(learner, version)
        if not keys:
            return Refusal(
                "unknown_learner", f"no key is registered for learner {learner!r} at version {version}"
            )
        if not self._signed_by(signed, learner, keys):
            listed = ", ".join(f"{key.hex()[:16]}…" for key in keys)
            return Refusal("bad_signature", f"the signature is not learner {learner}'s (public key {listed})")
        self._note(learner, keys[0])
        return None

    def _signed_by(self, signed: SignedMessage, learner: str, keys: Sequence[bytes]) -> bool:
        for key in keys:
            try:
                signed.verify(key, who=f"learner {learner}")
            except SignatureRefused:
                continue
            return True
        return False

    def _keys(self, learner: str, version: int) -> list[bytes]:
        with self._lock:
            speakers = self._history.speakers(learner, version)
        owner = self._owner(learner) if speakers.owner else None
        return [*([owner] if owner is not None else []), *speakers.keys]

    def _note(self, learner: str, key: bytes) -> None:
        """The ledger learns of the learner at its first verified message."""
        if learner not in self._noted:
            with self._lock:
                entries = self._history.entries(learner)
            first = entries[0].public_key if entries else None
            runs.add_learner(self._services.ledger, self._plan.run, learner, first or key)
            self._noted.add(learner)
            logger.info("learner_registered", extra={"run": self._plan.run, "learner": learner})

    def _load(self) -> KeyHistory:
        try:
            return registry.load(self._services.ledger, self._plan.manifest)
        except (MalformedMessage, SignatureRefused, ForkedHistory) as error:
            # The ledger is only the index of these: the bucket is read from its first entry again.
            logger.error("registry_index_refused", extra={"run": self._plan.run, "reason": str(error)})
            return KeyHistory(self._plan.manifest)

    def _read_on_if_due(self) -> None:
        now = self._services.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + REGISTRY_POLL_SECONDS
        try:
            self._read_on()
        except DeltapostError as error:  # the keys known so far count until it can be read
            logger.warning("registry_not_read", extra={"run": self._plan.run, "reason": str(error)})

    def _read_on(self) -> None:
        """Takes in what the registry has beyond what is known. Raises while that cannot be told."""
        with self._reading:
            now = self._services.monotonic()
            following = registry_key(self._plan.run, self._history.number + 1)
            try:
                self._compare()
                self._take_in()
            except (MalformedMessage, SignatureRefused, ForkedHistory) as error:
                self._say(str(error))
            except StoreError as error:
                if not self._failing.alone(following):
                    raise
                self._say(str(error))
            else:
                self._say(None)
                self._failing.forget(following)
            self._read_at = now

    def _compare(self) -> None:
        """The newest entry that the ledger knew at the start is the bucket's. Raises ForkedHistory."""
        if self._compared:
            return
        key = registry_key(self._plan.run, self._history.number)
        try:
            data = self._services.store.get(key, length=2 * MAX_MESSAGE_BYTES + 1).data
        except ObjectMissing:
            data = b""
        if hashlib.sha256(data).digest() != self._history.head:
            raise ForkedHistory(
                f"the registry entry {key!r} is not the one that the ledger has",
                hint="it was replaced or removed: the ledger's column learner_keys.entry has its bytes",
            )
        self._compared = True

    def _take_in(self) -> None:
        batch: list[StoredEntry] = []
        found = entries_after(
            self._services.store,
            self._plan.manifest,
            number=self._history.number,
            previous=self._history.head,
        )
        try:
            for stored in found:
                batch.append(stored)
                if len(batch) == BATCH_ENTRIES:
                    self._add(batch)
                    batch = []
        finally:  # those before one that is refused count
            self._add(batch)

    def _add(self, batch: list[StoredEntry]) -> None:
        registry.index(self._services.ledger, self._plan.run, batch)
        for stored in batch:
            with self._lock:
                self._history.add(stored.entry, stored.sha256)
            logger.info(
                "learner_key_changed",
                extra={
                    "run": self._plan.run,
                    "number": stored.entry.number,
                    "action": stored.entry.action,
                    "learner": stored.entry.learner,
                    "from_version": stored.entry.from_version,
                },
            )

    def _say(self, problem: str | None) -> None:
        """In readiness, and in the log when it is news."""
        component = f"run {self._plan.run} registry"
        if problem is None:
            self._services.health.fine(component)
        else:
            self._services.health.problem(component, problem)
            if problem != self._problem:
                logger.error("registry_refused", extra={"run": self._plan.run, "reason": problem})
        self._problem = problem

    def _owner(self, learner: str) -> bytes | None:
        """The key in `learners/ID`, from memory or the bucket; None for an id that nobody owns."""
        with self._lock:
            known = self._owners.get(learner)
            if known is not None:
                return known
            if self._unknown_until.get(learner, float("-inf")) > self._services.monotonic():
                return None
        try:
            data = self._services.store.get(learner_key(self._plan.run, learner), length=33).data
            if len(data) != 32:
                raise MalformedMessage(f"the key object of learner {learner!r} has not 32 bytes")
        except ObjectMissing:
            self._no_key(learner)
            return None
        except StoreError:
            if not self._failing.alone(learner):
                raise
            logger.warning("learner_key_unreadable", extra={"run": self._plan.run, "learner": learner})
            self._no_key(learner)
            return None
        except MalformedMessage as error:
            logger.warning("learner_key_malformed", extra={"run": self._plan.run, "reason": str(error)})
            return None
        self._failing.forget(learner)
        with self._lock:
            self._owners[learner] = data
        return data

    def _no_key(self, learner: str) -> None:
        with self._lock:
            if len(self._unknown_until) > MAX_REMEMBERED_IDS:
                self._unknown_until.clear()
            self._unknown_until[learner] = self._services.monotonic() + UNKNOWN_LEARNER_SECONDS
