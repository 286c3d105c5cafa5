"""`make load` (five minutes), `make soak` (two hours): a thousand learners, real servers, one machine.

    python benchmarks/load.py [--minutes N] [--rate N] [--aggregators N] [--json] [--record NAME]

Valkey, SeaweedFS, Postgres and `deltapost aggregator` are real processes; the learners are simulated here,
what they post is real. Each learner posts to one fragment after another, `--rate` envelopes a second in all,
for the version it last saw announced. In the end all but one learner leave, which lets the open rounds close,
and every envelope that was posted is looked up in the bucket's records: each must be there exactly once.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from crowd import RUN, Crowd, until
from facts import keep, where
from parts import Parts, end, running
from rich.console import Console
from rich.table import Table
from sqlalchemy import func, select, text

from deltapost.algorithms.diloco import DiLoCo, WeightedMean
from deltapost.errors import DeltapostError, ObjectMissing
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import Base, ContributionRow, LearnerRow, ParticipantRow
from deltapost.serialization.names import commits_stream, envelope_stream, members_stream, record_key
from deltapost.serialization.records import Record
from deltapost.streams import position_key

#: Seconds between two `alive` of a learner.
ALIVE_SECONDS = 10.0
PUBLISHERS = 8


class Posting:
    """Posts envelopes at a steady rate from a few threads, and follows the commits."""

    def __init__(self, crowd: Crowd, rate: float) -> None:
        self.crowd, self.rate = crowd, rate
        self.failures: Counter[str] = Counter()
        self.behind = 0.0
        self._due: queue.Queue[tuple[str, int] | None] = queue.Queue()
        self._stop = threading.Event()
        loops = [self._schedule, self._follow, self._alive, *[self._publish] * PUBLISHERS]
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Posts what is due by now, and nothing more; goes on following."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _schedule(self) -> None:
        """The n-th envelope is due n / rate seconds after the start, whatever happened to those before."""
        began, number = time.monotonic(), 0
        while not self._stop.is_set():
            wait = began + number / self.rate - time.monotonic()
            if wait > 0:
                time.sleep(min(wait, 0.05))
                continue
            learner = self.crowd.learners[number % len(self.crowd.learners)]
            turn = number // len(self.crowd.learners)
            fragment = (number + turn) % self.crowd.config.fragments
            self._due.put((learner, fragment))
            self.behind = max(self.behind, self._due.qsize() / self.rate)
            number += 1
        for _ in range(PUBLISHERS):
            self._due.put(None)

    def _publish(self) -> None:
        while (due := self._due.get()) is not None:
            learner, fragment = due
            try:
                self.crowd.publish(learner, fragment, self.crowd.versions[fragment])
            except DeltapostError as error:
                self.failures[type(error).__name__] += 1

    def _follow(self) -> None:
        while not self._stop.is_set():
            self.crowd.follow(0.2)

    def _alive(self) -> None:
        while not self._stop.is_set():
            for learner in self.crowd.learners:
                self.crowd.alive(learner)
                if self._stop.wait(ALIVE_SECONDS / len(self.crowd.learners)):
                    return


class Watch:
    """Samples memory of the aggregators and lengths of the streams once a second."""

    def __init__(self, crowd: Crowd, processes: list[Any]) -> None:
        self._crowd, self._processes = crowd, processes
        self.memory: list[tuple[float, float]] = []
        self.longest: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        log, fragments = self._crowd.log, self._crowd.config.fragments
        began = time.monotonic()
        while not self._stop.wait(1.0):
            self.memory.append((time.monotonic() - began, sum(rss(each.pid) for each in self._processes)))
            lengths = {
                "envelopes, one fragment": max(log.length(envelope_stream(RUN, f)) for f in range(fragments)),
                "members": log.length(members_stream(RUN)),
                "commits": log.length(commits_stream(RUN)),
            }
            for name, length in lengths.items():
                self.longest[name] = max(self.longest[name], length)

    def slope(self) -> float:
        """Growth of memory in MB per minute, by least squares over the second half."""
        half = self.memory[len(self.memory) // 2 :]
        if len(half) < 2:
            return 0.0
        return 60 * statistics.linear_regression(*zip(*half, strict=True)).slope


def rss(pid: int) -> float:
    """Resident memory in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def seconds_of(entry_id: str) -> float:
    return position_key(entry_id)[0] / 1_000


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    if not values:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    ordered = sorted(values)
    at = lambda part: ordered[min(len(ordered) - 1, int(part * len(ordered)))]  # noqa: E731
    return {
        name: round(1_000 * value, 1)
        for name, value in (("p50", at(0.5)), ("p99", at(0.99)), ("max", ordered[-1]))
    }


def verdict_times(ledger: Ledger) -> list[float]:
    """Seconds from append to the transaction that wrote the verdict, by the servers' own clocks."""
    with ledger.read() as session:
        rows = session.execute(select(ContributionRow.entry_id, ContributionRow.received_at)).all()
    return [received.timestamp() - seconds_of(entry) for entry, received in rows if entry is not None]


def announcement_times(ledger: Ledger, crowd: Crowd) -> list[float]:
    """Seconds from the verdict that made the quorum to the announcement of its round."""
    with ledger.read() as session:
        rows = session.execute(
            select(ParticipantRow.fragment, ParticipantRow.version, func.max(ContributionRow.received_at))
            .join(
                ContributionRow,
                (ContributionRow.run == ParticipantRow.run)
                & (ContributionRow.envelope == ParticipantRow.envelope),
            )
            .group_by(ParticipantRow.fragment, ParticipantRow.version)
        ).all()
    found = []
    for fragment, version, stood in rows:
        at = crowd.announced.get((fragment, version))
        if at is not None:
            found.append(
                at
                - (stood if isinstance(stood, datetime) else datetime.fromisoformat(stood))
                .replace(tzinfo=UTC)
                .timestamp()
            )
    return found


def tables(ledger: Ledger) -> dict[str, dict[str, float]]:
    """Rows and MB of each table that has any."""
    found = {}
    with ledger.read() as session:
        for table in Base.metadata.sorted_tables:
            rows = session.scalar(select(func.count()).select_from(table)) or 0
            size = session.scalar(text(f"SELECT pg_total_relation_size('{table.name}')"))
            if rows:
                found[table.name] = {"rows": rows, "megabytes": round(float(size or 0) / 1e6, 2)}
    return found


def answered(crowd: Crowd) -> Counter[bytes]:
    """How often the bucket's records name each envelope."""
    found: Counter[bytes] = Counter()
    for fragment in range(crowd.config.fragments):
        version = 1
        while True:
            try:
                data = crowd.store.get(record_key(RUN, fragment, version)).data
            except ObjectMissing:
                break
            record = Record.from_bytes(data)
            found.update(each.envelope for each in record.participants)
            found.update(each.envelope for each in record.answers)
            version += 1
    return found


def finish(crowd: Crowd, seconds: float) -> Counter[bytes]:
    """Lets the open rounds close until records answer every envelope; what they answer when time is up."""
    last, *others = crowd.learners
    for learner in others:
        crowd.leave(learner)
    deadline = time.monotonic() + seconds
    posted = dict(crowd.posted)
    while True:
        found = answered(crowd)
        if all(envelope in found for envelope in posted) or time.monotonic() > deadline:
            return found
        crowd.alive(last)
        crowd.follow(0.0)
        for fragment in {fragment for envelope, (fragment, _) in posted.items() if envelope not in found}:
            crowd.publish(last, fragment, crowd.versions[fragment])
        ended = time.monotonic() + 5
        while time.monotonic() < ended:
            crowd.follow(0.5)


def measure(
    parts: Parts, *, minutes: float, rate: float, learners: int, quorum: int, count: int
) -> dict[str, Any]:
    config = DiLoCo(
        sync_every=16, fragments=16, in_flight=1, outer_lr=0.5, merge=WeightedMean(),
        quorum_size=quorum, min_quorum=1, grace_seconds=0.0,
    )  # fmt: skip
    print("registering learners …", file=sys.stderr, flush=True)
    crowd = Crowd(parts.store, parts.log, config, learners=learners, parameters=1_000)
    crowd.register()
    ledger = open_ledger(parts.ledger_url)
    program = [sys.executable, "-m", "deltapost.cli.main", "aggregator"]
    processes = [parts.aggregator(f"aggregator-{number}", program) for number in range(count)]
    posting, watch = Posting(crowd, rate), Watch(crowd, processes)
    try:
        # Learners of a real run do not all come at once: what their first messages cost is not measured here.
        until(lambda: known(ledger) == learners, "knowing every learner", seconds=600)
        began = time.monotonic()
        posting.start()
        while (passed := time.monotonic() - began) < 60 * minutes:
            time.sleep(min(10.0, 60 * minutes - passed))
            print(
                f"{passed / 60:.1f} min: {len(crowd.posted)} posted, {len(crowd.announced)} rounds",
                file=sys.stderr,
                flush=True,
            )
        posting.stop()
        seconds = time.monotonic() - began
        posted, rounds = len(crowd.posted), len(crowd.announced)
        cpu = [cpu_seconds(each.pid) for each in processes]
        watch.stop()
        print("closing what is open …", file=sys.stderr, flush=True)
        sizes = tables(ledger)
        found = finish(crowd, seconds=300)
        verdicts, announced = verdict_times(ledger), announcement_times(ledger, crowd)
    finally:
        for each in processes:
            end(each)
        for log in parts.directory.glob("*.log"):
            failed = log.read_text().count("step_failed") + log.read_text().count("step_crashed")
            print(f"{log.name}: {failed} failed steps", file=sys.stderr)
        ledger.close()
    lost = [envelope for envelope in list(crowd.posted) if envelope not in found]
    return {
        "learners": learners,
        "fragments": config.fragments,
        "parameters_per_fragment": 1_000,
        "quorum": quorum,
        "aggregators": count,
        "seconds": round(seconds, 1),
        "wanted_per_second": rate,
        "posted": posted,
        "envelopes_per_second": round(posted / seconds, 1),
        "publishing_failures": dict(posting.failures),
        "posting_behind_seconds": round(posting.behind, 1),
        "rounds": rounds,
        "append_to_verdict_ms": quantiles(verdicts),
        "quorum_to_announcement_ms": quantiles(announced),
        "aggregator_cpu_seconds": [round(each, 1) for each in cpu],
        "memory_mb_end": round(watch.memory[-1][1], 1) if watch.memory else 0.0,
        "memory_mb_per_minute": round(watch.slope(), 3),
        "longest_streams": dict(watch.longest),
        "tables": sizes,
        "posted_in_all": len(crowd.posted),
        "answered_once": sum(1 for envelope in crowd.posted if found.get(envelope) == 1),
        "answered_more_than_once": sum(1 for envelope in crowd.posted if found.get(envelope, 0) > 1),
        "not_answered": len(lost),
    }


def known(ledger: Ledger) -> int:
    """Learners whose keys the aggregators have seen."""
    with ledger.read() as session:
        return session.scalar(select(func.count()).select_from(LearnerRow)) or 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['learners']} learners, {result['fragments']} fragments", show_header=False)
    for name in (
        "seconds", "posted", "envelopes_per_second", "posting_behind_seconds", "rounds",
        "aggregator_cpu_seconds",
        "append_to_verdict_ms", "quorum_to_announcement_ms", "memory_mb_end", "memory_mb_per_minute",
        "longest_streams", "answered_once", "answered_more_than_once", "not_answered",
    ):  # fmt: skip
        value = result[name]
        shown = (
            ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        )
        table.add_row(name.replace("_", " "), str(shown))
    for name, size in result["tables"].items():
        table.add_row(f"table {name}", f"{size['rows']} rows, {size['megabytes']} MB")
    Console().print(table)


def main(
    minutes: Annotated[float, typer.Option(min=0.2, help="Minutes of posting.")] = 5.0,
    rate: Annotated[float, typer.Option(min=1, help="Envelopes per second, all learners together.")] = 60.0,
    learners: Annotated[int, typer.Option(min=2, help="Simulated learners.")] = 1_000,
    quorum: Annotated[int, typer.Option(min=1, help="Contributions that close a round.")] = 64,
    aggregators: Annotated[int, typer.Option(min=1, help="Aggregator processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    record: Annotated[str, typer.Option(help="Write it to records/DATE-NAME.json.")] = "",
) -> None:
    """A thousand learners against real servers on one machine. Progress goes to stderr."""
    facts = where("load")
    with running(s3=True, postgres=True) as parts:
        measured = measure(
            parts, minutes=minutes, rate=rate, learners=learners, quorum=quorum, count=aggregators
        )
    result = {"benchmark": "load", **facts, **measured}
    if record:
        keep(record, result)
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        show(result)
    whole = result["not_answered"] == 0 and result["answered_more_than_once"] == 0
    raise typer.Exit(0 if whole else 1)


if __name__ == "__main__":
    typer.run(main)
