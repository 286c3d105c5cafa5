"""Courier: the learner's background thread: says it is alive, follows commits, posts again what got lost.

Training never waits for it. Whatever store or Redis do, it logs, waits and goes on; what it brings lies in
`take` until the learner aligns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deltapost.errors import DeltapostError, HistoryError, MalformedMessage, SignatureRefused
from deltapost.learner.following import Commit, Follower
from deltapost.learner.journal import Journal, JournalEntry
from deltapost.learner.publishing import Publisher
from deltapost.limits import MAX_MEMBERS_ENTRIES
from deltapost.serialization.messages import (
    AdviceMessage,
    AliveMessage,
    CommitMessage,
    JoinMessage,
    LeaveMessage,
    MemberMessage,
    PassMessage,
    read_message,
    sign_message,
)
from deltapost.serialization.names import commits_stream, envelope_stream, members_stream
from deltapost.serialization.signing import SigningKey
from deltapost.serialization.verdicts import Verdict
from deltapost.streams import START, MessageLog, position_key

logger = logging.getLogger(__name__)

LONGEST_REPOST_SECONDS = 300.0
#: Seconds between looks for a next record that no announcement spoke of, while something is unanswered.
PROBE_SECONDS = 5.0


@dataclass
class _Repost:
    at: float
    pause: float


@dataclass
class CourierTimes:
    """Intervals in seconds."""

    poll: float
    alive: float
    repost: float
    probe: float = PROBE_SECONDS


@dataclass
class Courier:
    """One learner's courier. `lock` guards journal, publisher and follower against the training thread."""

    run: str
    learner: str
    key: SigningKey
    log: MessageLog
    follower: Follower
    journal: Journal
    publisher: Publisher
    lock: threading.RLock
    times: CourierTimes
    session: int
    position: str = START
    local_step: int = 0
    waiting: bool = False
    monotonic: Callable[[], float] = time.monotonic
    #: Envelopes, by hash, whose verdict became known, in order: for the learner's own information.
    verdicts: dict[bytes, Verdict | None] = field(default_factory=dict)
    failure: HistoryError | SignatureRefused | None = None

    def __post_init__(self) -> None:
        self.arrived = threading.Condition(self.lock)
        self._inbox: dict[int, Commit] = {}
        self._counter = 0
        self._stop = threading.Event()
        self._alive_at = 0.0
        self._probe_at = self.monotonic() + self.times.probe
        self._reposts: dict[bytes, _Repost] = {}
        self._thread = threading.Thread(
            target=self._loop, name=f"deltapost courier {self.learner}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the step in progress is finished first."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def take(self, fragment: int) -> Commit | None:
        """The newest commit of the fragment that has come since the last call."""
        with self.lock:
            return self._inbox.pop(fragment, None)

    def has(self, fragment: int) -> bool:
        with self.lock:
            return fragment in self._inbox

    def join(self) -> None:
        """Posts the session's first message. Raises StreamUnavailable."""
        self._say(JoinMessage(run=self.run, learner=self.learner, session=self.session, counter=0))

    def leave(self) -> None:
        """Says that nobody need wait for this learner any more."""
        self._say(
            LeaveMessage(
                run=self.run, learner=self.learner, session=self.session, counter=self._next_counter()
            )
        )

    def pass_round(self, fragment: int, version: int) -> None:
        """Says that nothing will come from this learner for the round."""
        self._say(
            PassMessage(
                run=self.run,
                learner=self.learner,
                session=self.session,
                counter=self._next_counter(),
                fragment=fragment,
                version=version,
            )
        )

    def _next_counter(self) -> int:
        with self.lock:
            self._counter += 1
            return self._counter

    def _say(self, message: MemberMessage) -> None:
        frame = sign_message(message, self.key).frame
        self.log.append(members_stream(self.run), frame, max_length=MAX_MEMBERS_ENTRIES)

    def _loop(self) -> None:
        pause = 0.2
        while not self._stop.is_set():
            try:
                self.step(self.times.poll)
                pause = 0.2
            except (HistoryError, SignatureRefused) as error:
                logger.error("history_refused", extra=self._fields() | {"reason": str(error)})
                with self.arrived:
                    self.failure = error
                    self.arrived.notify_all()
                return
            except DeltapostError as error:
                logger.warning("courier_step_failed", extra=self._fields() | {"reason": str(error)})
                self._stop.wait(pause)
                pause = min(2 * pause, 5.0)
            except Exception:
                logger.exception("courier_step_crashed", extra=self._fields())
                self._stop.wait(5.0)

    def step(self, wait_seconds: float) -> None:
        """One turn: alive, mail, records, re-posts. Raises what store, stream or history raise."""
        now = self.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + self.times.alive
            self._say(
                AliveMessage(
                    run=self.run,
                    learner=self.learner,
                    session=self.session,
                    counter=self._next_counter(),
                    local_step=self.local_step,
                    waiting=self.waiting,
                )
            )
        news = self._read_mail(wait_seconds)
        if self.monotonic() >= self._probe_at:
            self._probe_at = self.monotonic() + self.times.probe
            with self.lock:
                news |= {entry.message.fragment for entry in self.journal.unanswered()}
        for fragment in sorted(news):
            self._fetch(fragment)
        self._repost()

    def _read_mail(self, wait_seconds: float) -> set[int]:
        """Fragments that a commit was announced for."""
        stream = commits_stream(self.run)
        bounds = self.log.bounds(stream)
        if bounds is None or position_key(bounds.last_id) < position_key(self.position):
            self.position = START  # the stream was emptied; what is announced again is recognised
        news: set[int] = set()
        for entry in self.log.read(stream, self.position, limit=256, wait_seconds=wait_seconds):
            self.position = entry.id
            try:
                signed = read_message(entry.data or b"")
                pinned = self.follower.aggregator_key
                if pinned is not None:
                    signed.verify(pinned, who="the run's aggregator")
            except (MalformedMessage, SignatureRefused) as error:
                logger.info("announcement_refused", extra=self._fields() | {"reason": str(error)})
                continue
            match signed.message:
                case CommitMessage(run=run, fragment=fragment, version=version) if run == self.run:
                    if self.follower.is_news(fragment, version):
                        news.add(fragment)
                case AdviceMessage(run=run, learner=learner) as advice if (run, learner) == (
                    self.run,
                    self.learner,
                ):
                    self._advised(advice)
        return news

    def _advised(self, advice: AdviceMessage) -> None:
        with self.lock:
            entry = self.journal.advise(advice.envelope, advice.verdict)
        if entry is not None:
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

    def _fetch(self, fragment: int) -> None:
        with self.lock:
            commit = self.follower.next_commit(fragment)
            if commit is None:
                return
            self.settle(commit)
            self._inbox[fragment] = commit
            self.arrived.notify_all()

    def settle(self, commit: Commit) -> None:
        """Answers the journal's entries of the fragment from the records up to the commit."""
        read = {record.base: record for record in commit.records}
        for entry in self.journal.unanswered():
            message = entry.message
            if message.fragment != commit.fragment or message.version >= commit.version:
                continue
            record = read.get(message.version) or self.follower.record_of_base(
                message.fragment, message.version
            )
            verdict = record.verdicts().get(entry.signed.sha256) if record is not None else None
            self.journal.settle(entry, verdict)
            self.verdicts[entry.signed.sha256] = verdict
            self._reposts.pop(entry.signed.sha256, None)

    def _repost(self) -> None:
        """Posts unanswered envelopes again: on a new stream epoch, or when their time has come."""
        with self.lock:
            entries = self.journal.unanswered()
        now = self.monotonic()
        epochs: dict[int, str | None] = {}
        for entry in entries:
            timer = self._reposts.get(entry.signed.sha256)
            if timer is None:
                timer = _Repost(now + self.times.repost, self.times.repost)
                self._reposts[entry.signed.sha256] = timer
            if now >= timer.at or self._new_epoch(entry, epochs):
                with self.lock:
                    if self.journal.find(entry.message.fragment, entry.message.version) != entry:
                        continue  # answered or replaced meanwhile
                    self.publisher.post(entry, repeated=True)
                timer.pause = min(2 * timer.pause, LONGEST_REPOST_SECONDS)
                timer.at = now + timer.pause

    def _new_epoch(self, entry: JournalEntry, epochs: dict[int, str | None]) -> bool:
        fragment = entry.message.fragment
        if fragment not in epochs:
            epochs[fragment] = self.log.epoch(envelope_stream(self.run, fragment))
        posted_in = self.publisher.posted_epochs.get(fragment)
        return epochs[fragment] is not None and epochs[fragment] != posted_in and posted_in is not None

    def _fields(self) -> dict[str, object]:
        return {"run": self.run, "learner": self.learner}
