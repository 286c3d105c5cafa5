"""`make bench-job`: the whole job beside gradientmail 0.0.2, four learners whose steps sleep.

    python benchmarks/job.py [--passes N] [--rounds N] [--postgres] [--peer-python PATH] [--json] [--record]

Both sides take turns on the same SeaweedFS, each learner a process of its own, all with default settings:
here with Valkey, SQLite as in the README, and a `deltapost aggregator`; there sessions also close rounds.
A round's seconds go from its last upload, among those made before anybody aligned with it, until the last
learner is aligned. Requests are SeaweedFS's own count, over some rounds in a row, whatever they are for.
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
from facts import keep, where
from parts import Parts, end, running
from peers import python_of
from rich.console import Console
from rich.table import Table

from fixtures.ports import free_ports

WORKERS = Path(__file__).parent / "workers"
PEER = "gradientmail==0.0.2"
LEARNERS = 4
GIVEN: dict[str, Any] = {
    "fragments": 4, "parameters": 2_000_000, "step_seconds": 0.05, "sync_every": 40, "in_flight": 2
}  # fmt: skip
#: Rounds that are not measured: connections open, averages form.
WARM_UP = 12
#: Rounds in a row whose requests are one sample.
WINDOW = 8
#: What has to be reached: the ratio of seconds, and requests a round.
AT_LEAST = 10.0
MOST_REQUESTS = 3 * LEARNERS + 8


class Rounds:
    """What the learners said, by (fragment, number) of the round."""

    def __init__(self) -> None:
        self._uploaded: dict[tuple[int, int], list[float]] = {}
        self._aligned: dict[tuple[int, int], dict[str, float]] = {}
        self._held: dict[tuple[str, int], int] = {}
        self.seconds: list[float] = []
        self.uploads: list[int] = []

    def hear(self, learner: str, what: str, at: float, fragment: int, number: int) -> bool:
        """Takes in one line; whether all learners are aligned with one more round by it."""
        if what == "uploaded":
            self._uploaded.setdefault((fragment, number), []).append(at)
            return False
        before = self._held.get((learner, fragment), -1)
        self._held[learner, fragment] = number
        complete = False
        # One who takes over a newer version at once is aligned with those between as well.
        for passed in [key for key in self._uploaded if key[0] == fragment and before < key[1] <= number]:
            aligned = self._aligned.setdefault(passed, {})
            aligned[learner] = at
            if len(aligned) == LEARNERS:
                times = [each for each in self._uploaded.pop(passed) if each <= min(aligned.values())]
                if times:
                    self.seconds.append(max(aligned.values()) - max(times))
                    self.uploads.append(len(times))
                complete = True
        return complete


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

    def __init__(self, parts: Parts, metrics_port: int, python: Path) -> None:
        self._parts, self._metrics_port, self._python = parts, metrics_port, python
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
        given = GIVEN | {
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
    """One pass of one side: seconds of each round, requests a round, and uploads that were in time."""
    heard: queue.Queue[tuple[str, str, float, int, int]] = queue.Queue()
    found, requests = Rounds(), []
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
    passes: Annotated[int, typer.Option(min=1, help="Passes of each side, in turns.")] = 3,
    rounds: Annotated[int, typer.Option(min=WINDOW, help="Rounds measured in each pass.")] = 40,
    postgres: Annotated[bool, typer.Option("--postgres", help="Postgres instead of SQLite.")] = False,
    peer_python: Annotated[str, typer.Option(help="A Python from 3.12 on, for the peer.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write it to records/.")] = False,
) -> None:
    """Seconds from a round's last upload to all aligned, and requests a round. Progress goes to stderr."""
    console = Console(stderr=True)
    facts = where("bench-job")
    python = python_of(PEER, python=peer_python or None, console=console)
    sides: dict[str, dict[str, list[float]]] = {
        side: {"seconds": [], "requests": [], "uploads": []} for side in ("deltapost", "gradientmail")
    }
    (port,) = free_ports(1)
    with running(s3=True, postgres=postgres, metrics_port=port) as parts:
        place = Place(parts, port, python)
        for number in range(passes):
            for side, samples in sides.items():
                one = measured(place, side, rounds)
                for name, values in one.items():
                    samples[name] += values
                seconds, asked = (statistics.median(one[name]) for name in ("seconds", "requests"))
                console.print(f"pass {number + 1}, {side}: {seconds:.3f} s, {asked:.1f} requests a round")
    result = facts | summary(sides) | {"ledger": "postgresql" if postgres else "sqlite"}
    if record:
        console.print(f"written to {keep('job', result)}")
    if as_json:
        print(json.dumps(result))
    else:
        show(result)


def summary(sides: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The samples with their medians, and the ratios of those."""
    rows: dict[str, Any] = {}
    for side, samples in sides.items():
        ordered = sorted(samples["seconds"])
        rows[side] = {
            "median_seconds": round(statistics.median(ordered), 4),
            "p90_seconds": round(ordered[int(0.9 * (len(ordered) - 1))], 4),
            "median_requests": round(statistics.median(samples["requests"]), 2),
            "mean_requests": round(statistics.mean(samples["requests"]), 2),
            "mean_uploads": round(statistics.mean(samples["uploads"]), 2),
            "seconds": [round(each, 4) for each in samples["seconds"]],
            "requests": [round(each, 2) for each in samples["requests"]],
        }
    return {
        "peer": PEER,
        "learners": LEARNERS,
        **GIVEN,
        "sides": rows,
        "ratio": round(rows["gradientmail"]["median_seconds"] / rows["deltapost"]["median_seconds"], 1),
        "at_least": AT_LEAST,
        "most_requests": MOST_REQUESTS,
    }


def show(result: dict[str, Any]) -> None:
    table = Table("", "deltapost", "gradientmail", "", title="The whole job: a round")
    mine, theirs = (result["sides"][side] for side in ("deltapost", "gradientmail"))

    def row(what: str, name: str, digits: int, verdict: str) -> None:
        table.add_row(what, f"{mine[name]:.{digits}f}", f"{theirs[name]:.{digits}f}", verdict)

    row(
        "seconds, last upload to all aligned, median",
        "median_seconds",
        3,
        f"{result['ratio']:.1f} times, at least {AT_LEAST:.0f}",
    )
    row("the same, 90 of 100", "p90_seconds", 3, "")
    row("S3 requests, median", "median_requests", 1, f"at most {MOST_REQUESTS}")
    row("S3 requests, mean", "mean_requests", 1, "")
    row("uploads in time, mean", "mean_uploads", 1, f"of {LEARNERS}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
