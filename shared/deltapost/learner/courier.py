"""Courier: the learner's background thread: follows commits, and posts again what no record answered.

Each turn starts from what is known, not from what the turn before left undone: announced versions not yet
followed, journal entries not yet answered. So whatever store, Redis or disk do, the next turn makes up for
it. Training does not wait for it; the lock it shares with training is the journal's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from deltapost.errors import (
    DeltapostError,
    HistoryError,
    MalformedMessage,
    SignatureRefused,
    StateUnavailable,
    StoreError,
)
from deltapost.events import events
from deltapost.learner.announcements import Announcements
from deltapost.learner.announcing import RunAnnouncer
from deltapost.learner.following import Commit, Follower
from deltapost.learner.inbox import Inbox
from deltapost.learner.journal import Journal, JournalEntry
from deltapost.learner.publishing import Publisher
from deltapost.limits import PROBE_SECONDS
from deltapost.serialization.messages import AdviceMessage, CommitMessage, read_message
from deltapost.serialization.names import commits_stream, envelope_stream
from deltapost.serialization.records import Record
from deltapost.serialization.verdicts import Verdict
from deltapost.streams import START, MessageLog, position_key

logger = events(__name__)

LONGEST_REPOST_SECONDS = 300.0
#: Seconds between looks for the run's end marker, in case its announcements were lost.
END_PROBE_SECONDS = 30.0
#: Contributions in a row that rounds closed without, before each warning: one or two are a slow step.
PASSED_OVER_WARNING = 5


@dataclass
class _Repost:
    at: float
    pause: float


class Courier:
    """One learner's courier."""

    def __init__(
        self,
        *,
        run: str,
        learner: str,
        log: MessageLog,
        follower: Follower,
        journal: Journal,
        publisher: Publisher,
        inbox: Inbox,
        announcer: RunAnnouncer,
        position: str,
        poll_seconds: float,
        repost_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._learner = learner
        self._log = log
        self._follower = follower
        self._journal = journal
        self._publisher = publisher
        self._inbox = inbox
        self._announcer = announcer
        self._position = position
        self._poll_seconds = poll_seconds
        self._repost_seconds = repost_seconds
        self._monotonic = monotonic
        self._announcements = Announcements()
        self._passed_over = 0
        self._probe_at = monotonic() + PROBE_SECONDS
        self._followed_at = monotonic()
        #: When each fragment was last looked at: because it was announced, or because it was silent.
        self._looked_at = dict.fromkeys(follower.fragments, monotonic())
        self._end_probe_at = monotonic() + END_PROBE_SECONDS
        #: What a session finds in its journal is posted again at once: nobody knows what became of it.
        self._reposts = {
            entry.signed.sha256: _Repost(monotonic(), repost_seconds) for entry in journal.unanswered()
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"deltapost courier {learner}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the turn in progress is finished first."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        pause = 0.2
        while not self._stop.is_set():
            try:
                self.step(self._poll_seconds)
                pause = 0.2
            except (HistoryError, SignatureRefused) as error:
                logger.error("history_refused", extra=self._fields() | {"reason": str(error)})
                self._inbox.fail(error)
                return
            except DeltapostError as error:
                logger.warning("courier_step_failed", extra=self._fields() | {"reason": str(error)})
                self._stop.wait(pause)
                pause = min(2 * pause, 5.0)
            except Exception:
                logger.exception("courier_step_crashed", extra=self._fields())
                self._stop.wait(5.0)

    def step(self, wait_seconds: float) -> None:
        """One turn: mail, commits, answers, re-posts. Raises what store, stream, disk or history raise."""
        self._read_mail(wait_seconds)
        self._follower.persist()
        failures: list[DeltapostError] = []
        for fragment in sorted(self._worth_a_look()):
            try:
                self._look(fragment)
            except (HistoryError, SignatureRefused):
                raise
            except DeltapostError as error:  # this fragment waits, the others do not
                failures.append(error)
        self.settle()
        self._repost()
        if failures:
            raise failures[0]

    def _look(self, fragment: int) -> None:
        """Follows the fragment as far as it has come."""
        self._looked_at[fragment] = self._monotonic()
        followed = self._follower.version(fragment)
        commit = self._follower.next_commit(fragment, self._announcements.of(fragment, followed))
        if commit is not None:
            self._followed_at = self._monotonic()
            self._inbox.put(commit)
            self._follower.advance(commit)
            self.settle(commit)
        self._announcements.looked(fragment, self._follower.version(fragment))

    def _read_mail(self, wait_seconds: float) -> None:
        stream = commits_stream(self._run)
        bounds = self._log.bounds(stream)
        if bounds is None or position_key(bounds.last_id) < position_key(self._position):
            self._position = START  # the stream was emptied; what is announced again is recognised
        for entry in self._log.read(stream, self._position, limit=256, wait_seconds=wait_seconds):
            self._position = entry.id
            try:
                signed = read_message(entry.data or b"")
                pinned = self._follower.aggregator_key
                if pinned is not None:
                    signed.verify(pinned, who="the run's aggregator")
            except (MalformedMessage, SignatureRefused) as error:
                logger.info("announcement_refused", extra=self._fields() | {"reason": str(error)})
                continue
            match signed.message:
                case CommitMessage() as commit if commit.run == self._run:
                    self._announced(commit, known=pinned is not None)
                case AdviceMessage() as advice if (advice.run, advice.learner) == (self._run, self._learner):
                    self._advised(advice)

    def _announced(self, commit: CommitMessage, *, known: bool) -> None:
        """`known`: the run's aggregator signed it. Before its first commit anybody may have: worth a look."""
        if not self._follower.has(commit.fragment):
            return
        if not known:
            self._announcements.ring(commit.fragment)
        elif commit.version > self._follower.version(commit.fragment):
            self._announcements.add(commit)

    def _worth_a_look(self) -> set[int]:
        """Fragments announced beyond what was followed, and of those that were silent, what may be due.

        An announcement that the stream lost may have been the last: every PROBE_SECONDS, those with something
        unanswered and the one that was silent longest are looked at, if they were silent as long.
        """
        follower, now = self._follower, self._monotonic()
        fragments = {
            fragment
            for fragment in follower.fragments
            if self._announcements.worth_a_look(fragment, follower.version(fragment))
        }
        if now >= self._probe_at:
            waiting = {entry.message.fragment for entry in self._journal.unanswered()}
            waiting.add(min(self._looked_at, key=self._looked_at.__getitem__))
            silent = {each for each in waiting if now - self._looked_at[each] >= PROBE_SECONDS}
            if silent:
                self._probe_at = now + PROBE_SECONDS
            fragments |= silent
        if now >= self._end_probe_at:
            self._end_probe_at = now + END_PROBE_SECONDS
            # A run that went on meanwhile was not over.
            if now - self._followed_at >= END_PROBE_SECONDS and follower.run_may_be_over():
                fragments |= set(follower.fragments)
        return {fragment for fragment in fragments if not self._inbox.ended(fragment)}

    def _advised(self, advice: AdviceMessage) -> None:
        if self._journal.advise(advice.envelope, advice.verdict) is not None:
            logger.warning(
                "contribution_refused",
                extra=self._fields()
                | {
                    "fragment": advice.fragment,
                    "version": advice.version,
                    "envelope": advice.envelope.hex(),
                    "verdict": advice.verdict,
                },
            )

    def settle(self, commit: Commit | None = None) -> None:
        """Answers the journal's entries whose round is closed, from that round's record or the end."""
        read: dict[tuple[int, int], Record] = {}
        if commit is not None:
            read = {(record.fragment, record.base): record for record in commit.records}
        ends = {f: end for f in self._follower.fragments if (end := self._follower.end(f)) is not None}
        for fragment in ends:
            self._inbox.end(fragment)
        for entry in self._journal.unanswered():
            round_key = (entry.message.fragment, entry.message.version)
            end = ends.get(entry.message.fragment)
            if entry.message.version >= self._follower.version(entry.message.fragment) and end is None:
                continue
            try:
                if end is not None and entry.message.version >= end.version - 1:
                    self._journal.settle(entry, end.verdicts().get(entry.signed.sha256))
                    self._reposts.pop(entry.signed.sha256, None)
                    continue
                record = read.get(round_key) or self._follower.record_of_base(*round_key)
                if record is None:
                    continue  # behind the newest version there is one: the store does not show it yet
                verdict = record.verdicts().get(entry.signed.sha256)
                self._journal.settle(entry, verdict)
                self._count_passed_over(verdict)
            except (StoreError, StateUnavailable) as error:
                logger.warning("answer_delayed", extra=self._fields() | {"reason": str(error)})
                continue
            self._reposts.pop(entry.signed.sha256, None)

    def _count_passed_over(self, verdict: Verdict | None) -> None:
        """Says so when round after round closes without a word about this learner's contribution."""
        self._passed_over = self._passed_over + 1 if verdict is None else 0
        if self._passed_over and self._passed_over % PASSED_OVER_WARNING == 0:
            logger.warning(
                "contributions_passed_over",
                extra=self._fields()
                | {
                    "contributions": self._passed_over,
                    "reason": "the last rounds closed without them: they come too late, or this key "
                    f"counts no longer (see: deltapost learner list {self._run})",
                },
            )

    def _repost(self) -> None:
        """Posts unanswered envelopes again: on a new stream epoch, or when their time has come.

        Perhaps nobody knows of the run: it is announced again with them.
        """
        epochs: dict[int, str | None] = {}
        announced = False
        for entry in self._journal.unanswered():
            now = self._monotonic()
            timer = self._reposts.setdefault(
                entry.signed.sha256, _Repost(now + self._repost_seconds, self._repost_seconds)
            )
            if now < timer.at and not self._new_epoch(entry, epochs):
                continue
            timer.at = now + timer.pause
            timer.pause = min(2 * timer.pause, LONGEST_REPOST_SECONDS)
            try:
                if not announced:
                    self._announcer.announce()
                    announced = True
                self._publisher.post(entry, repeated=True)
            except (DeltapostError, OSError) as error:
                logger.warning(
                    "repost_failed",
                    extra=self._fields() | {"envelope": entry.signed.sha256.hex(), "reason": str(error)},
                )

    def _new_epoch(self, entry: JournalEntry, epochs: dict[int, str | None]) -> bool:
        fragment = entry.message.fragment
        if fragment not in epochs:
            epochs[fragment] = self._log.epoch(envelope_stream(self._run, fragment))
        posted_in = self._publisher.posted_epochs.get(fragment)
        return epochs[fragment] is not None and posted_in is not None and epochs[fragment] != posted_in

    def _fields(self) -> dict[str, object]:
        return {"run": self._run, "learner": self._learner}
