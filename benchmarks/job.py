"""`make bench-job`: the whole job beside gradientmail 0.0.2, four learners whose steps sleep.

    python benchmarks/job.py [--samples N] [--rounds N] [--postgres] [--peer-python PATH] [--json] [--record]

Both sides take turns on the same SeaweedFS, each learner a process of its own, all with default settings:
here with Valkey, SQLite as in the README, and a `deltapost aggregator`; there sessions also close rounds.
Only the quorum is not the default of one: with it a round waits, here as there, for whom it hopes to see, and
what is measured would be that policy; so both wait for all four learners.
A round's seconds go from its last upload, among those made before anybody aligned with it, until the last
learner is aligned. Requests are SeaweedFS's own count, over some rounds in a row, whatever they are for.
What of that time is the store's, asked the same by nobody else, and what the wait for the end of the step, in
which a learner aligns, stands beside it.
"""

from __future__ import annotations

import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from facts import where
from harness import AsJson, PeerPython, Record, Row, Samples, Scale, compared, console, deliver, times
from job_alone import last_step_ends, store_alone
from job_rounds import Rounds
from parts import Parts, end, running
from peers import python_of

from fixtures.ports import free_ports

WORKERS = Path(__file__).parent / "workers"
PEER = "gradientmail==0.0.2"
LEARNERS = 4
GIVEN: dict[str, Any] = {
    "fragments": 4, "parameters": 2_000_000, "step_seconds": 0.05, "sync_every": 40, "in_flight": 2,
    "quorum_size": LEARNERS,
}  # fmt: skip
#: Rounds that are not measured: connections open, and the first pass of garbage collection of an aggregator
#: that has just started makes one listing a second. The next one is due after ten minutes.
WARM_UP = 80
#: Times that what a round asks of the store is asked alone.
ALONE_SAMPLES = 15
#: Rounds in a row whose requests are one sample.
WINDOW = 4
#: Requests of a round, at most.
MOST_REQUESTS = 3 * LEARNERS + 8


class Learner:
    """One learner's process; its lines come to `heard`."""

    def __init__(self, command: list[Any], environment: dict[str, str], name: str, heard: Any) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._heard = heard
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                self._heard.put((self.name, *json.loads(line)))
        self._heard.put((self.name, "ended", time.monotonic(), 0, 0))

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Place:
    """The servers of both sides, and how each side's processes are started there."""

    def __init__(self, parts: Parts, metrics_port: int, python: Path, given: dict[str, Any]) -> None:
        self._parts, self._metrics_port, self._python, self._given = parts, metrics_port, python, given
        self._runs = 0

    def requests(self) -> int:
        """Requests that SeaweedFS has answered, of every kind and outcome."""
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        with urllib.request.urlopen(url) as reply:
            text = reply.read().decode()
        return sum(
            int(count) for count in re.findall(r"^SeaweedFS_s3_request_total\{.*\} (\d+)$", text, re.M)
        )

    @contextmanager
    def learners(self, side: str, heard: Any) -> Iterator[list[Learner]]:
        """The side's processes, of a new run; learners wait until they are told to go."""
        self._runs += 1
        parts, run = self._parts, f"job-{self._runs}"
        secrets = {
            f"AWS_{name}": parts.environment[f"DELTAPOST_S3_{name}"]
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        }
        environment = {**os.environ, **parts.environment, **secrets, "AWS_DEFAULT_REGION": "us-east-1"}
        given = self._given | {
            "run": run,
            "store": parts.store_url,
            "redis_url": parts.redis_url,
            "bucket": parts.store_url.split("/")[2],
            "endpoint": parts.environment["DELTAPOST_S3_ENDPOINT"],
            "state_dir": str(parts.directory / run),
        }
        python = self._python if side == "gradientmail" else Path(sys.executable)
        aggregator = None
        if side == "deltapost":
            program = [sys.executable, "-m", "deltapost.cli.main", "aggregator"]
            aggregator = parts.aggregator(run, program, serve_runs=run)
        started: list[Learner] = []
        try:
            for number in range(LEARNERS):
                name = f"learner-{number}"
                told = json.dumps(given | {"learner": name})
                command = [python, WORKERS / f"job_{side}.py", told]
                started.append(Learner(command, environment, name, heard))
            yield started
        finally:
            for learner in started:
                learner.stop()
            if aggregator is not None:
                end(aggregator)


def measured(place: Place, side: str, rounds: int) -> dict[str, list[float]]:
    """One sample of a side: seconds of each round, requests a round, and uploads that were in time."""
    heard: queue.Queue[tuple[str, str, float, int, int]] = queue.Queue()
    found, requests = Rounds(LEARNERS), []
    with place.learners(side, heard) as learners:
        ready = complete = counted = 0
        while complete < WARM_UP + rounds:
            try:
                name, what, at, fragment, number = heard.get(timeout=120)
            except queue.Empty:
                sys.exit(f"{side}: nothing was aligned for two minutes")
            if what == "ended":
                sys.exit(f"{side}: {name} ended, see above")
            if what == "ready":
                ready += 1
                if ready == LEARNERS:
                    for learner in learners:
                        learner.go()
                continue
            if not found.hear(name, what, at, fragment, number):
                continue
            complete += 1
            since = complete - WARM_UP
            if since == 0:
                found.seconds.clear()
                found.uploads.clear()
            if since >= 0 and since % WINDOW == 0:
                now = place.requests()
                if since:
                    requests.append((now - counted) / WINDOW)
                counted = now
    return {"seconds": found.seconds, "requests": requests, "uploads": [*map(float, found.uploads)]}


def main(
    samples: Samples = 2,
    rounds: Annotated[int, typer.Option(min=WINDOW, help="Rounds measured in each sample.")] = 24,
    postgres: Annotated[bool, typer.Option("--postgres", help="Postgres instead of SQLite.")] = False,
    scale: Scale = 1.0,
    peer_python: PeerPython = "",
    as_json: AsJson = False,
    record: Record = False,
) -> None:
    """Seconds from a round's last upload to all aligned, and requests a round. Progress goes to stderr."""
    facts = where("bench-job")
    given = GIVEN | {"parameters": max(GIVEN["fragments"], round(scale * GIVEN["parameters"]))}
    python = python_of(PEER, python=peer_python or None, console=console)
    sides: dict[str, dict[str, list[float]]] = {side: {} for side in ("deltapost", "gradientmail")}
    (port,) = free_ports(1)
    with running(s3=True, postgres=postgres, metrics_port=port) as parts:
        alone = store_alone(
            parts.store,
            payload_bytes=4 * given["parameters"] // given["fragments"],
            learners=LEARNERS,
            samples=ALONE_SAMPLES,
        )
        place = Place(parts, port, python, given)
        for number in range(samples):
            for side, found in sides.items():
                one = measured(place, side, rounds)
                for name, values in one.items():
                    found.setdefault(name, []).extend(values)
                seconds, asked = (statistics.median(one[name]) for name in ("seconds", "requests"))
                console.print(f"{number + 1}, {side}: {seconds:.3f} s, {asked:.1f} requests a round")
    ledger = "postgresql" if postgres else "sqlite"
    result = facts | {"peer": PEER, **given, "scale": scale, "ledger": ledger, "rows": rows(sides, alone)}
    deliver("job", result, title="The whole job", as_json=as_json, record=record)


def rows(sides: dict[str, dict[str, list[float]]], alone: dict[str, float]) -> dict[str, Row]:
    """What the rounds of both sides come to. `alone`: the seconds of what they ask of the store."""
    bound = {"store": sum(alone.values()), "steps": last_step_ends(GIVEN["step_seconds"], LEARNERS)}
    each = {name: {side: found[name] for side, found in sides.items()} for name in ("seconds", "requests")}
    uploads = {side: round(statistics.mean(found["uploads"]), 2) for side, found in sides.items()}
    slow = {side: sorted(found)[int(0.9 * (len(found) - 1))] for side, found in each["seconds"].items()}
    asked = each["requests"] | {"3N + 8": [float(MOST_REQUESTS)]}
    means = {side: round(statistics.mean(found), 2) for side, found in each["requests"].items()}
    return {
        "last upload to all aligned, 4 learners, 4 fragments, 2M": compared(
            each["seconds"],
            times("gradientmail", "deltapost"),
            at_least=10.0,
            aim=20.0,
            uploads_in_time=uploads,
            ninety_of_a_hundred=slow,
        ),
        "S3 requests of such a round, over 3N + 8": compared(
            asked, times("deltapost", "3N + 8"), at_most=1.0, unit="requests", means=means
        ),
        "last upload to all aligned, over store and step alone": compared(
            {"deltapost": each["seconds"]["deltapost"], "store and step": [round(sum(bound.values()), 4)]},
            times("deltapost", "store and step"),
            alone={**alone, "the last learner's step ends": round(bound["steps"], 4)},
        ),
    }


if __name__ == "__main__":
    typer.run(main)
