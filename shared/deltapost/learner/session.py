"""Run: a learner's side of a run, from the model it trains to the commits it takes over.

A training loop calls, per step: `count_step`, `publish_due`, `align`. All else happens behind: the journal,
the heartbeat, following commits, posting again. `publish_contribution` is the one call underneath, for loops
that keep their own counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from deltapost.adapters import Model
from deltapost.algorithms.plan import RunPlan
from deltapost.algorithms.schedule import Schedule
from deltapost.errors import ConfigurationError, DeltapostError, RunFinished, StateUnavailable
from deltapost.events import events
from deltapost.learner.courier import Courier
from deltapost.learner.files import DirectoryLock
from deltapost.learner.following import Commit, Follower
from deltapost.learner.inbox import Inbox
from deltapost.learner.journal import Journal
from deltapost.learner.presence import Presence
from deltapost.learner.progress import Aligned, Progress
from deltapost.learner.publishing import Publisher, Receipt, delta_values, payload_ref
from deltapost.serialization import TensorBytes
from deltapost.serialization.messages import ContributionMessage

logger = events(__name__)

#: Seconds between the warnings of a learner that waits for a commit.
WAIT_WARNING_SECONDS = 30.0
#: How much of the difference to the newest step's seconds their average takes over.
STEP_SECONDS_RATE = 0.1


class Run:
    """One learner in one run, made by `deltapost.join`. Use it from one thread; it is a context manager."""

    def __init__(
        self,
        *,
        plan: RunPlan,
        learner: str,
        model: Model,
        publisher: Publisher,
        follower: Follower,
        journal: Journal,
        inbox: Inbox,
        courier: Courier,
        presence: Presence,
        directory_lock: DirectoryLock,
    ) -> None:
        self.plan = plan
        self.learner = learner
        self._model = model
        self._publisher = publisher
        self._follower = follower
        self._journal = journal
        self._inbox = inbox
        self._courier = courier
        self._presence = presence
        self._directory_lock = directory_lock
        config = plan.config
        self._schedule = Schedule(config.sync_every, config.fragments, config.in_flight, config.overlap_steps)
        self._anchors: dict[int, Mapping[str, TensorBytes]] = {}
        self._progress: dict[int, Progress] = {}
        self._step_started: float | None = None
        self._step_seconds: float | None = None
        self._looked_at = 0
        self._owed: list[int] = []
        self._left = False
        self.local_step = 0
        #: Payload bytes uploaded and anchor or update bytes read, by this object.
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def name(self) -> str:
        return self.plan.run

    def __repr__(self) -> str:
        return f"Run({self.name!r}, learner={self.learner!r}, versions={self.versions})"

    @property
    def versions(self) -> list[int]:
        """The version the model holds, by fragment."""
        return [self._progress[fragment].version for fragment in sorted(self._progress)]

    def version(self, fragment: int) -> int:
        """The version of the fragment that the model holds: what a contribution is computed against."""
        return self._progress[fragment].version

    @property
    def finished(self) -> bool:
        """Whether the run has ended: nothing is due, `align` waits for nothing, publishing raises."""
        return all(map(self._inbox.ended, range(len(self.plan.fragments))))

    def anchor(self, fragment: int) -> Mapping[str, TensorBytes]:
        """The fragment's anchor at `version(fragment)`, by parameter name."""
        return self._anchors[fragment]

    def count_step(self, tokens: int, *, seconds: float | None = None) -> None:
        """Counts one training step on `tokens` tokens; `seconds` defaults to the time since the last call."""
        now = time.monotonic()
        if seconds is None and self._step_started is not None:
            seconds = now - self._step_started
        self._step_started = now
        if seconds is not None:
            before = seconds if self._step_seconds is None else self._step_seconds
            self._step_seconds = before + STEP_SECONDS_RATE * (seconds - before)
        self.local_step += 1
        self._presence.local_step = self.local_step
        for progress in self._progress.values():
            progress.steps += 1
            progress.tokens += tokens

    def due(self) -> list[int]:
        """The fragments whose turn came since the last `publish_due`, and that may be published.

        Not those already published for the version the model holds (unless the owner refused that), nor
        without a step since. While `in_flight` are outstanding a turn is owed: steps accumulate, and it comes
        as soon as a slot is free, before later turns, so that slow rounds of one fragment starve no other.
        """
        return self._turns()[0]

    def _turns(self) -> tuple[list[int], list[int]]:
        """Of the free fragments with a turn, owed ones first: those with a slot, and those without."""
        new = self._schedule.due(self._looked_at, self.local_step)
        turns = [fragment for fragment in dict.fromkeys((*self._owed, *new)) if self._free(fragment)]
        outstanding = sum(map(self._outstanding, self._progress)) if turns else 0
        slots = sum(self._schedule.may_publish(outstanding + more) for more in range(len(turns)))
        return turns[:slots], turns[slots:]

    def _outstanding(self, fragment: int) -> bool:
        return self._journal.outstanding(fragment, self.version(fragment))

    def _free(self, fragment: int) -> bool:
        """Whether there is something to publish of the fragment, and its slot is free."""
        entry = self._journal.find(fragment, self.version(fragment))
        open_still = not self._inbox.ended(fragment)
        return open_still and self._progress[fragment].steps > 0 and (entry is None or entry.refused)

    def publish_due(
        self,
        *,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
    ) -> list[Receipt]:
        """Publishes each fragment that is due; most steps none is.

        A store, stream or disk that fails does not stop training: what was journalled is posted later (its
        receipt says `posted=False`), what could not even be journalled waits for the fragment's next turn. A
        loss that is not finite is left out. Else raises as `publish_contribution` does.
        """
        due, self._owed = self._turns()
        self._looked_at = self.local_step
        receipts = [self._publish_counted(fragment, loss, metrics, final) for fragment in due]
        return [receipt for receipt in receipts if receipt is not None]

    def publish_final(self, *, loss: float | None = None) -> list[Receipt]:
        """Publishes, as the last of this learner, every fragment with steps that no round holds yet.

        Fails as little as `publish_due`.
        """
        free = [fragment for fragment in sorted(self._progress) if self._free(fragment)]
        receipts = [self._publish_counted(fragment, loss, None, True) for fragment in free]
        return [receipt for receipt in receipts if receipt is not None]

    def _publish_counted(
        self, fragment: int, loss: float | None, metrics: Mapping[str, float] | None, final: bool
    ) -> Receipt | None:
        progress = self._progress[fragment]
        if loss is not None and not math.isfinite(loss):
            logger.warning("loss_left_out", extra={"run": self.name, "fragment": fragment, "loss": str(loss)})
            loss = None
        try:
            return self.publish_contribution(
                fragment,
                progress.version,
                anchor=self._anchors[fragment],
                theta=self._model,
                local_step=self.local_step,
                steps=progress.steps,
                tokens=progress.tokens,
                step_seconds=self._step_seconds or 0.0,
                loss=loss,
                metrics=metrics,
                final=final,
            )
        except RunFinished:
            return None
        except DeltapostError as error:
            if not error.retryable:
                raise
            logger.warning("publish_delayed", extra=self._facts(fragment) | {"reason": str(error)})
        entry = self._journal.find(fragment, progress.version)
        if entry is None or entry.refused:
            return None
        return self._publisher.receipt(entry, "", repeated=False, posted=False)

    def publish_contribution(
        self,
        fragment: int,
        version: int,
        *,
        delta: Any = None,
        anchor: Any = None,
        theta: Any = None,
        local_step: int,
        steps: int,
        tokens: int,
        step_seconds: float,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
    ) -> Receipt:
        """Uploads this learner's delta of `fragment` against `version` and posts its envelope.

        The delta is given as `delta`, or as `anchor` and `theta` (delta = anchor - theta); each is a mapping
        of parameter names to tensors, arrays or TensorBytes, or a model, in the schema's shapes. `tokens` and
        `steps` were trained since the model held `version`; `step_seconds` is the mean of a step.

        Calling it again for the same (fragment, version) posts the journalled bytes again and changes
        nothing, unless the owner has refused them (a verdict that leaves the slot free): then the new
        contribution takes their place.

        Raises SchemaMismatch, NonFinite (nothing is published then), MalformedMessage for counters or metrics
        out of range; RunFinished; StoreUnavailable or StreamUnavailable when it is journalled but not posted
        yet: the courier posts it once that is possible.
        """
        count = len(self.plan.fragments)
        if not 0 <= fragment < count:
            raise ConfigurationError(f"fragment {fragment} of run {self.name!r}: it has {count}, from 0")
        known = self._journal.find(fragment, version)
        if known is not None and (known.answered or version < self.version(fragment)):
            posted = known.answered and known.verdict is not None
            return self._publisher.receipt(known, "", repeated=True, posted=posted)
        if known is not None and not known.refused:
            try:
                return self._publisher.post(known, repeated=True)
            except StateUnavailable:
                now = self._journal.find(fragment, version)
                if now is None or not now.answered:
                    raise
                return self._publisher.receipt(now, "", repeated=True)  # answered this very moment
        if self._inbox.ended(fragment):
            raise RunFinished(f"fragment {fragment} of run {self.name!r} has ended: nothing more is merged")
        values = delta_values(
            self.plan, fragment, self._model.backend, delta=delta, anchor=anchor, theta=theta
        )
        payload = self._publisher.encode(fragment, values)
        message = ContributionMessage.from_arguments(
            run=self.name,
            learner=self.learner,
            fragment=fragment,
            version=version,
            payload=payload_ref(payload),
            local_step=local_step,
            steps=steps,
            tokens=tokens,
            step_seconds=float(step_seconds),
            loss=None if loss is None else float(loss),
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            final=final,
        )
        self._progress[fragment].published_step = self.local_step
        receipt = self._publisher.publish(message, payload)
        self.bytes_sent += len(payload)
        return receipt

    def pass_round(self, fragment: int, version: int) -> None:
        """Tells the aggregators, until that round is closed, that this learner will not contribute to it."""
        self._presence.pass_round(fragment, version)

    def align(self, *, wait_seconds: float | None = None) -> list[Aligned]:
        """Takes over the newest commits that have come: overwrites those fragments of the model, in place.

        Steps made on a fragment since its version are given up with it; what was published of them is in the
        commit. Waits where the algorithm's `overlap_steps` makes an outstanding commit a barrier: for as long
        as it takes, or at most `wait_seconds` where that is given, which also waits for any commit at all.
        Raises ForkedHistory or SignatureRefused when history does not hold.
        """
        started = time.monotonic()
        deadline = float("inf") if wait_seconds is None else started + wait_seconds
        self._wait_at_barriers(deadline)
        if wait_seconds is not None:
            self._inbox.wait(lambda: any(map(self._inbox.has, self._progress)) or self.finished, deadline)
        self._inbox.check()
        if self._step_started is not None:
            self._step_started += time.monotonic() - started  # waiting is no part of a step
        aligned = []
        for fragment in sorted(self._progress):
            commit = self._inbox.take(fragment)
            if commit is not None:
                aligned.append(self._take_over(commit))
        return aligned

    def wait_for(self, fragment: int, version: int, *, timeout: float) -> bool:
        """Waits until the model holds at least `version` of the fragment, aligning; False when time is up."""
        deadline = time.monotonic() + timeout
        while self.version(fragment) < version:
            left = deadline - time.monotonic()
            if left <= 0 or (self.finished and not self._inbox.has(fragment)):
                return False
            self.align(wait_seconds=left)
        return True

    def _wait_at_barriers(self, deadline: float) -> None:
        """Returns when no commit is overdue, or at `deadline`. A refused contribution ends its wait too."""
        for fragment, progress in self._progress.items():
            if not self._schedule.must_wait(self.local_step - progress.published_step):
                continue

            def over(fragment: int = fragment) -> bool:
                news = self._inbox.has(fragment) or self._inbox.ended(fragment)
                return news or not self._unaligned(fragment)

            self._presence.waiting = True
            try:
                while not self._inbox.wait(over, min(deadline, time.monotonic() + WAIT_WARNING_SECONDS)):
                    if time.monotonic() >= deadline:
                        return
                    facts = self._facts(fragment) | {"held": progress.version}
                    logger.warning("waiting_for_commit", extra=facts)
            finally:
                self._presence.waiting = False

    def _unaligned(self, fragment: int) -> bool:
        """Whether a contribution to the version the model holds is out or answered: a commit is to come."""
        entry = self._journal.find(fragment, self.version(fragment))
        return entry is not None and not entry.refused

    def _take_over(self, commit: Commit) -> Aligned:
        for name, tensor in commit.anchor.items():
            self._model.assign(name, tensor)
        self._anchors[commit.fragment] = commit.anchor
        before = self._progress.get(commit.fragment)
        self._progress[commit.fragment] = Progress(commit.version)
        self._presence.closed(commit.fragment, commit.version)
        self.bytes_received += commit.bytes_read
        merged: bool | None = None
        if before is not None and self._journal.find(commit.fragment, before.version) is not None:
            merged = any(
                record.base == before.version and participant.learner == self.learner
                for record in commit.records
                for participant in record.participants
            )
        return Aligned(commit.fragment, commit.version, merged, commit.bytes_read)

    def start(self) -> None:
        """Loads the newest versions into the model and starts the threads. Called by `join`."""
        for fragment in range(len(self.plan.fragments)):
            commit = self._follower.catch_up(fragment)
            self._take_over(commit)
            self._follower.advance(commit)
        self._courier.settle()
        if self.finished:
            raise RunFinished(
                f"run {self.name!r} is finished: the model holds its last anchors, versions {self.versions}"
            )
        self.local_step = self._schedule.start_step(self.versions)
        self._looked_at = self.local_step
        for progress in self._progress.values():
            progress.published_step = self.local_step  # of what was published before a restart
        self._presence.local_step = self.local_step
        self._presence.start()
        self._courier.start()

    def _facts(self, fragment: int) -> dict[str, object]:
        return {"run": self.name, "learner": self.learner, "fragment": fragment}

    def leave(self) -> None:
        """Says goodbye and ends the courier. What is unanswered stays journalled for the next session."""
        if self._left:
            return
        self._left = True
        self._courier.stop()
        try:
            self._presence.leave()
        except DeltapostError as error:
            logger.warning("leave_not_posted", extra={"run": self.name, "reason": str(error)})
        self._directory_lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
