"""Fleet: which fragments this aggregator serves, beside the others that live.

Each counts the living aggregators in the ledger and holds its share: it takes free fragments up to it, and
gives back what it holds beyond it, between rounds, once others have settled in. A fragment that nobody else
takes within a lease is served all the same. None of this is needed for safety: the lease's token fences every
transaction, whoever holds what.

A name is one process's. A second one of the same name serves nothing and says so until the first gives the
name up or has not renewed it for a lease; a restarted process waits that long too, unless it was stopped in
order.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from datetime import datetime

from deltapost.errors import DeltapostError
from deltapost.events import events
from deltapost.ledger import ending, fleet
from deltapost.ledger.fleet import Look, NameHeld
from deltapost.limits import MAX_TURN_SECONDS, PROBE_SECONDS
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.pool import Mail, Next, Pool
from deltapost_aggregator.shares import shares
from deltapost_aggregator.worker import FragmentWorker

logger = events(__name__)

#: Idle fragments looked at per second, all together: for records others wrote, streams that were emptied.
IDLE_LOOKS_PER_SECOND = 32
#: A position that no mail comes after.
NEVER = "9999999999999-0"


class Holding:
    """A fragment that this process serves, as a task of the pool."""

    def __init__(self, owner: Fleet, context: RunContext, fragment: int) -> None:
        self.name = f"run {context.run} fragment {fragment}"
        self.run = context.run
        self.fragment = fragment
        #: Its lease is being given back: it counts for nobody any more.
        self.leaving = False
        self.worker = FragmentWorker(context, fragment, probe_seconds=owner.probe_seconds)
        self._owner = owner

    def step(self) -> Next:
        try:
            progress = self.worker.step()
        finally:
            if self.worker.lease is not None:
                self._owner.held(self)
        if progress in ("not_owner", "finished") or self._owner.leaves(self, progress):
            self.worker.forget()
            self._owner.dropped(self)
            return "done"
        if progress == "ended":  # nothing is read any more: the others' ends are waited for
            seconds = self._owner.idle_seconds()
            return Mail(self.worker.waits_for()[0], NEVER, seconds)
        if progress != "idle":
            return "again"
        stream, position, seconds = self.worker.waits_for()
        return Mail(stream, position, min(seconds, self._owner.idle_seconds()))


class Fleet:
    """Takes, renews and gives back leases. `step` is called in a loop by one thread."""

    def __init__(self, services: Services, pool: Pool) -> None:
        self._services = services
        self._pool = pool
        self._name = services.settings.aggregator_name
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._served = threading.Event()
        self._contexts: dict[str, RunContext] = {}
        self._holdings: dict[tuple[str, int], Holding] = {}
        self._surplus: dict[str, int] = {}
        self._surplus_since: dict[str, float] = {}
        self._free_since: dict[tuple[str, int], float] = {}
        #: Fragments taken beyond the share because nobody else did, and who lived then.
        self._strays: set[tuple[str, int]] = set()
        self._living: frozenset[str] = frozenset()
        self._renew_at = 0.0
        self._named = False
        self._held_until: datetime | None = None
        self._reason = ""

    def serve(self, context: RunContext) -> None:
        """The run may be served from now on."""
        with self._lock:
            self._contexts[context.run] = context
            self._renew_at = 0.0
        self._served.set()

    def holdings(self, run: str) -> list[Holding]:
        """What is held of the run now, but for what is about to be given back."""
        with self._lock:
            return [
                holding for holding in self._holdings.values() if holding.run == run and not holding.leaving
            ]

    def idle_seconds(self) -> float:
        """How long an idle fragment waits for mail before it is looked at."""
        return max(self._services.settings.poll_seconds, len(self._holdings) / IDLE_LOOKS_PER_SECOND)

    def probe_seconds(self) -> float:
        """How long the bucket is not asked for a record that nobody spoke of."""
        return max(PROBE_SECONDS, self.idle_seconds())

    def step(self, wait_seconds: float) -> None:
        """Renews what is due, takes and gives back. Raises LedgerUnavailable."""
        if self._services.monotonic() >= self._renew_at:
            self._renew()
        if self._named:
            self._share_out()
        self._served.wait(wait_seconds)
        self._served.clear()

    def stop(self) -> None:
        """Gives the leases and the name back; call it when the pool has stopped."""
        tokens = [lease.token for holding in self._all() if (lease := holding.worker.lease) is not None]
        if self._named:
            fleet.leave(self._services.ledger, self._name, self._token, leases=tokens)

    def leaves(self, holding: Holding, progress: str) -> bool:
        """Whether the fragment goes to another aggregator now; its lease is given back then.

        After a commit, or idle when none came for a third of a lease: no seal is pending either way.
        """
        with self._lock:
            if not holding.leaving:
                if self._surplus.get(holding.run, 0) <= 0:
                    return False
                waited = self._services.monotonic() - self._surplus_since[holding.run]
                patient = self._services.settings.lease_seconds / 3
                idle = progress == "idle" and waited >= patient
                if not idle and progress not in ("committed", "adopted"):
                    return False
                self._surplus[holding.run] -= 1
                holding.leaving = True
        holding.worker.stop()
        logger.info("lease_given_back", extra={"run": holding.run, "fragment": holding.fragment})
        return True

    def held(self, holding: Holding) -> None:
        """The fragment's lease was acquired, or still is this process's."""
        self._services.health.holds(holding.run, holding.fragment)

    def dropped(self, holding: Holding) -> None:
        """The fragment is no longer held."""
        with self._lock:
            if self._holdings.get((holding.run, holding.fragment)) is holding:
                del self._holdings[holding.run, holding.fragment]
        self._services.health.dropped(holding.run, holding.fragment)

    def _all(self) -> list[Holding]:
        with self._lock:
            return list(self._holdings.values())

    def _renew(self) -> None:
        """Renews name and leases; that of a fragment not served for too long is left to run out."""
        seconds = self._services.settings.lease_seconds
        held = {
            lease.token: holding
            for holding in self._all()
            if (lease := holding.worker.lease) is not None and self._pool.busy_for(holding) < MAX_TURN_SECONDS
        }
        with self._lock:
            runs = list(self._contexts)
            self._renew_at = self._services.monotonic() + seconds / 3
        try:
            found = fleet.renew(
                self._services.ledger, self._name, self._token, runs=runs, leases=held, seconds=seconds
            )
        except DeltapostError:
            self._renew_at = 0.0
            raise
        if isinstance(found, NameHeld):
            self._refused(found)
            return
        if not self._named:
            logger.info("aggregator_named", extra={"owner": self._name})
        self._named, self._held_until, self._reason = True, None, ""
        self._services.health.fine("name")
        for token, holding in held.items():
            if token in found.lost:
                holding.worker.doubt_lease()
            else:
                holding.worker.lease_renewed()
        self._pool.wake(holding for token, holding in held.items() if token in found.lost)

    def _refused(self, found: NameHeld) -> None:
        """Another process bears the name: nothing is served until it is free. What was held is its now."""
        first = self._held_until if self._held_until is not None else found.until
        alive = self._named or found.until > first
        if alive:
            event = "aggregator_name_taken"
            reason = (
                f"another living process is named {self._name!r}; this one serves nothing "
                "(give each its own DELTAPOST_AGGREGATOR_NAME)"
            )
        else:
            event = "aggregator_name_waits"
            reason = (
                f"a process named {self._name!r} lived less than a lease ago; unless it still lives, "
                "this one takes its place when that lease ends"
            )
        if reason != self._reason:
            self._reason = reason
            logger.log(
                logging.ERROR if alive else logging.WARNING,
                event,
                extra={"owner": self._name, "until": found.until, "reason": reason},
            )
        self._services.health.problem("name", reason)
        self._held_until = first
        with self._lock:
            self._named = False
            self._renew_at = self._services.monotonic() + self._services.settings.poll_seconds
        held = self._all()
        for holding in held:
            holding.worker.doubt_lease()
        self._pool.wake(held)

    def _share_out(self) -> None:
        settings, now = self._services.settings, self._services.monotonic()
        asked = list(self._contexts)
        look = fleet.look(
            self._services.ledger,
            self._name,
            asked,
            settled_seconds=settings.lease_seconds / 3,
        )
        if self._name not in look.serving:  # its own name has run out meanwhile: renewed before anything else
            self._renew_at = 0.0
            return
        living = frozenset(look.serving)
        if living != self._living:
            logger.info("fleet_changed", extra={"living": sorted(living)})
            self._living = living
            self._strays.clear()
        self._let_go(asked, look)
        self._take(look, now)
        self._give_back(look, now)

    def _let_go(self, asked: list[str], look: Look) -> None:
        """Runs that are finished, whoever did it: nothing of them is served again."""
        for run in asked:
            if run not in look.fragments and ending.state(self._services.ledger, run) == "finished":
                with self._lock:
                    self._contexts.pop(run).finished = True

    def _take(self, look: Look, now: float) -> None:
        """Free fragments up to the share; beyond it, those that stayed free for a lease."""
        share = shares(look.fragments, look.serving).get(self._name, {})
        free = {
            (run, fragment)
            for run, fragments in look.free.items()
            for fragment in fragments
            if (run, fragment) not in self._holdings
        }
        self._free_since = {each: self._free_since.get(each, now) for each in free}
        for run, context in list(self._contexts.items()):
            mine = sorted((each for each in free if each[0] == run), key=self._order)
            room = share.get(run, 0) - len(self.holdings(run))
            for number, each in enumerate(mine):
                stray = now - self._free_since[each] > self._services.settings.lease_seconds
                if number >= room and not stray:
                    continue
                if number >= room:
                    self._strays.add(each)
                    logger.warning("fragment_nobody_took", extra={"run": run, "fragment": each[1]})
                self._hold(context, each[1])

    def _order(self, each: tuple[str, int]) -> bytes:
        """An order of one's own, so that two who take at once seldom want the same."""
        return hashlib.sha256(f"{self._name}/{each[0]}/{each[1]}".encode()).digest()

    def _hold(self, context: RunContext, fragment: int) -> None:
        holding = Holding(self, context, fragment)
        with self._lock:
            self._holdings[context.run, fragment] = holding
        self._pool.add(holding)

    def _give_back(self, look: Look, now: float) -> None:
        """Says how many fragments of each run are to go, so that those who settled in get their share."""
        settled = {
            name: runs for name, runs in look.serving.items() if name in look.settled or name == self._name
        }
        share = shares(look.fragments, settled).get(self._name, {})
        waking: list[Holding] = []
        for run in list(self._contexts):
            held = self.holdings(run)
            strays = sum((run, holding.fragment) in self._strays for holding in held)
            surplus = len(held) - strays - share.get(run, 0)
            with self._lock:
                if surplus > 0:
                    self._surplus_since.setdefault(run, now)
                else:
                    self._surplus_since.pop(run, None)
                self._surplus[run] = max(0, surplus)
            waking += held[: max(0, surplus)]
        self._pool.wake(waking)
