"""`make bench-takeover`: what a second aggregator adds, and how soon it has the fragments of one that died.

    python benchmarks/takeover.py [--seconds N] [--sqlite] [--s3] [--json] [--record]

Real processes over Valkey; every store call of an aggregator takes 100 ms longer. Learners post the next
contribution to a fragment as soon as its round is announced, so the aggregators never wait for them. One
aggregator alone, then two; then one of the two is killed with SIGKILL, and each of its fragments is watched
until the other has committed a round of it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from crowd import RUN, Crowd, until
from facts import keep, where
from parts import Parts, end, running
from rich.console import Console
from rich.table import Table
from sqlalchemy import select

from deltapost.algorithms.diloco import DiLoCo, WeightedMean
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.tables import FragmentRow
from deltapost.limits import LEASE_SECONDS

FRAGMENTS = 8
LEARNERS = 4
GRACE_SECONDS = 5.0
STORE_SECONDS = 0.1
#: What the second aggregator has to bring.
WANTED = 1.7


class Learners:
    """A crowd that publishes for each version as soon as the one before is announced."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.commits: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._workers = ThreadPoolExecutor(4)
        self._thread = threading.Thread(target=self._follow)

    def start(self) -> None:
        for fragment in range(FRAGMENTS):
            self._post(fragment, 0)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._workers.shutdown()

    def _post(self, fragment: int, version: int) -> None:
        for learner in self.crowd.learners:
            self._workers.submit(self.crowd.publish, learner, fragment, version).add_done_callback(_raised)

    def _follow(self) -> None:
        said = 0.0
        while not self._stop.is_set():
            if time.monotonic() - said > 5:
                said = time.monotonic()
                for learner in self.crowd.learners:
                    self.crowd.alive(learner)
            for fragment, version in self.crowd.follow(0.2):
                self.commits.append((time.monotonic(), fragment))
                self._post(fragment, version)

    def rate(self, seconds: float) -> float:
        """Rounds per minute from now on."""
        began, before = time.monotonic(), len(self.commits)
        time.sleep(seconds)
        return 60 * (len(self.commits) - before) / (time.monotonic() - began)


def _raised(done: Any) -> None:
    if done.exception() is not None:
        print(f"publishing failed: {done.exception()!r}", file=sys.stderr, flush=True)


def owners(ledger: Ledger) -> dict[int, str | None]:
    """Who holds each fragment."""
    with ledger.read() as session:
        rows = session.execute(select(FragmentRow.fragment, FragmentRow.owner, FragmentRow.lease_token))
        return {fragment: owner if token is not None else None for fragment, owner, token in rows}


def evenly(ledger: Ledger, *names: str) -> bool:
    held = list(owners(ledger).values())
    return all(held.count(name) == FRAGMENTS // len(names) for name in names)


def measure(parts: Parts, seconds: float) -> dict[str, Any]:
    config = DiLoCo(
        sync_every=FRAGMENTS,
        fragments=FRAGMENTS,
        in_flight=1,
        outer_lr=0.5,
        merge=WeightedMean(),
        quorum_size=LEARNERS,
        grace_seconds=GRACE_SECONDS,
    )
    crowd = Crowd(parts.store, parts.log, config, learners=LEARNERS, parameters=1_000)
    crowd.register()
    learners = Learners(crowd)
    ledger = open_ledger(parts.ledger_url)
    program = [sys.executable, str(Path(__file__).with_name("slow_aggregator.py")), str(STORE_SECONDS)]
    processes = [parts.aggregator("first", program)]
    try:
        until(lambda: len(owners(ledger)) == FRAGMENTS, "serving the run", seconds=120)
        learners.start()
        until(lambda: evenly(ledger, "first") and min(crowd.versions) >= 1, "one serving", seconds=120)
        one = learners.rate(seconds)
        print(f"one aggregator: {one:.0f} rounds per minute", file=sys.stderr, flush=True)
        processes.append(parts.aggregator("second", program))
        until(lambda: evenly(ledger, "first", "second"), "sharing", seconds=120)
        two = learners.rate(seconds)
        print(f"two aggregators: {two:.0f} rounds per minute", file=sys.stderr, flush=True)
        dead = [fragment for fragment, owner in owners(ledger).items() if owner == "second"]
        processes[1].kill()
        processes[1].wait()
        killed = time.monotonic()
        waits: dict[int, float] = {}

        def committed_again() -> bool:
            """A round of each that was not under way when its owner died."""
            by_first = {f for f, owner in owners(ledger).items() if owner == "first"}
            for at, fragment in list(learners.commits):
                if at > killed and fragment in dead and fragment in by_first:
                    waits.setdefault(fragment, at - killed)
            return len(waits) == len(dead)

        until(committed_again, "the takeover", seconds=120)
    finally:
        learners.stop()
        for process in processes:
            end(process)
        ledger.close()
        for log in parts.directory.glob("*.log"):
            print(f"{log.name}: {log.read_text().count('step_failed')} failed steps", file=sys.stderr)
    return {
        "run": RUN,
        "fragments": FRAGMENTS,
        "learners": LEARNERS,
        "store_seconds_added": STORE_SECONDS,
        "lease_seconds": LEASE_SECONDS,
        "grace_seconds": GRACE_SECONDS,
        "rounds_per_minute_one": round(one, 1),
        "rounds_per_minute_two": round(two, 1),
        "ratio": round(two / one, 2),
        "fragments_of_the_dead": len(dead),
        "seconds_to_commit_first": round(min(waits.values()), 1),
        "seconds_to_commit_last": round(max(waits.values()), 1),
    }


def main(
    seconds: Annotated[float, typer.Option(min=5, help="Seconds of each measurement.")] = 60.0,
    sqlite: Annotated[bool, typer.Option("--sqlite", help="SQLite instead of Postgres.")] = False,
    s3: Annotated[bool, typer.Option("--s3", help="SeaweedFS instead of a directory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write it to records/.")] = False,
) -> None:
    """What a second aggregator adds, and how soon it replaces one that died. Progress goes to stderr."""
    facts = where("bench-takeover")
    with running(s3=s3, postgres=not sqlite) as parts:
        result = {
            "benchmark": "takeover",
            **facts,
            "ledger": "sqlite" if sqlite else "postgresql",
            "store": "seaweedfs" if s3 else "directory",
            **measure(parts, seconds),
        }
    limit = LEASE_SECONDS + GRACE_SECONDS
    result["passed"] = result["ratio"] >= WANTED and result["seconds_to_commit_last"] <= limit
    if record:
        keep("takeover", result)
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        table = Table(title="Two aggregators beside one, and a takeover", show_header=False)
        table.add_row("rounds per minute, one aggregator", f"{result['rounds_per_minute_one']:.0f}")
        table.add_row("rounds per minute, two aggregators", f"{result['rounds_per_minute_two']:.0f}")
        table.add_row(f"ratio (at least {WANTED})", f"{result['ratio']:.2f}")
        table.add_row("fragments of the killed one", str(result["fragments_of_the_dead"]))
        table.add_row(
            "first and last of them committed after",
            f"{result['seconds_to_commit_first']:.1f} s, "
            f"{result['seconds_to_commit_last']:.1f} s (at most {limit:.0f} s)",
        )
        Console().print(table)
    raise typer.Exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    typer.run(main)
