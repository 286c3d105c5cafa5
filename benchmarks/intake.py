"""`make bench-intake`: envelopes that an aggregator takes in per second, beside a bare loop.

    python benchmarks/intake.py [--samples N] [--json] [--record]

Valkey and Postgres are real, and so are the envelopes, which all wait in their streams when a sample begins;
the fragments have their owner by then. An aggregator's `FragmentWorker.step` reads, checks, judges and writes
them, once with signatures checked and once with every signature believed; payloads cost nothing. The bare
loop reads the same entries, as many at a time, inserts a row of the same widths for each with one
`executemany` and commits with the new position: it looks at nothing. The sides take turns; a ratio is of the
median rates. Of the registered run's many fragments, which threads of one interpreter share, the rates are
told only.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psycopg
import redis
import typer
from envelopes import Waiting, free_payloads, signatures_believed, waiting
from facts import where
from harness import AsJson, Record, Row, Samples, compared, console, deliver, times
from parts import Parts, running
from psycopg.types.json import Jsonb

from deltapost.ledger.engine import open_ledger
from deltapost.limits import WORKER_THREADS
from deltapost.serialization.names import envelope_stream
from deltapost.streams import START
from deltapost_aggregator.caution import BATCH_ENTRIES
from deltapost_aggregator.context import Health
from deltapost_aggregator.pool import Next, Pool
from deltapost_aggregator.worker import FragmentWorker

#: Fragments that one sample fills, learners of each, and whether the run is a registered one.
CASES: dict[str, tuple[int, int, bool]] = {
    "1 fragment, 2,048 learners": (1, 2_048, False),
    "16 fragments, 128 learners, registered": (16, 128, True),
}
CHECKED, BELIEVED, BARE = "signatures checked", "signatures believed", "bare loop"
#: Of the bare loop's rate, at least; and envelopes per second with signatures, at least.
AT_LEAST = {CHECKED: 0.3, BELIEVED: 0.5}
PER_SECOND_AT_LEAST = 1_500.0

COLUMNS = (
    "run, envelope, fragment, version, learner, message, payload_sha256, payload_size, local_step, steps, "
    "tokens, step_seconds, loss, metrics, final, verdict, deliveries, entry_id, stream_epoch, received_at"
)


class Serving:
    """One fragment, stepped by a pool's threads until nothing of it waits."""

    def __init__(self, run: Waiting, fragment: int, done: Callable[[], None]) -> None:
        """Takes the fragment over: its stream is empty still."""
        self.name = f"fragment {fragment}"
        self._worker, self._done = FragmentWorker(run.context, fragment), done
        self._worker.step()

    def step(self) -> Next:
        if self._worker.step() != "idle":
            return "again"
        self._done()
        return "done"


def aggregator(run: Waiting, waits: Mapping[int, Sequence[bytes]]) -> float:
    """Seconds until an aggregator has taken in what waits in these fragments' streams."""
    pool, left, idle = Pool(Health()), [len(waits)], threading.Event()

    def done() -> None:
        left[0] -= 1
        if not left[0]:
            idle.set()

    serving = [Serving(run, fragment, done) for fragment in waits]
    for fragment, frames in waits.items():
        run.post(fragment, frames)
    for one in serving:
        pool.add(one)
    threads = [threading.Thread(target=pool.serve) for _ in range(min(WORKER_THREADS, len(waits)))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    idle.wait()
    seconds = time.perf_counter() - began
    pool.stop()
    for thread in threads:
        thread.join()
    return seconds


class Bare:
    """Reads, inserts and commits; decides nothing."""

    def __init__(self, parts: Parts) -> None:
        self._client = redis.Redis.from_url(parts.redis_url)
        self._connection = psycopg.connect(parts.ledger_url)
        self._connection.execute("CREATE TABLE bare (LIKE contributions INCLUDING ALL)")
        self._connection.execute("CREATE TABLE bare_positions (stream text PRIMARY KEY, position text)")
        self._connection.commit()

    def take(self, run: str, fragments: Iterable[int]) -> float:
        """Seconds until everything that waits in these fragments' streams is in the table."""
        began = time.perf_counter()
        for fragment in fragments:
            self._take(run, fragment)
        return time.perf_counter() - began

    def _take(self, run: str, fragment: int) -> None:
        stream, position = envelope_stream(run, fragment), START
        insert = f"INSERT INTO bare ({COLUMNS}) VALUES ({', '.join(['%s'] * len(COLUMNS.split(',')))})"
        self._connection.execute("INSERT INTO bare_positions VALUES (%s, %s)", (stream, position))
        while reply := self._client.xread({stream: position}, count=BATCH_ENTRIES):
            entries = reply[0][1]
            with self._connection.cursor() as cursor:
                cursor.executemany(
                    insert, [_row(run, fragment, entry_id, fields[b"m"]) for entry_id, fields in entries]
                )
                position = entries[-1][0].decode()
                cursor.execute(
                    "UPDATE bare_positions SET position = %s WHERE stream = %s", (position, stream)
                )
            self._connection.commit()

    def close(self) -> None:
        self._connection.close()
        self._client.close()


_METRICS = Jsonb({"grad_norm": 0.7312, "learning_rate": 3e-4, "tokens_per_second": 13_107.2, "inner": 2.44})
_HASH = hashlib.sha256(b"payload").digest()
_NOW = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _row(run: str, fragment: int, entry_id: bytes, frame: bytes) -> tuple[Any, ...]:
    entry = entry_id.decode()
    return (
        run, hashlib.sha256(frame).digest(), fragment, 0, entry, frame, _HASH, 16_384, 128, 128,
        524_288, 0.3125, 2.5128, _METRICS, False, "accepted", 1, entry, "0123456789abcdef", _NOW,
    )  # fmt: skip


def measured(parts: Parts, bare: Bare, name: str, samples: int) -> dict[str, Row]:
    """What the rates of all sides in one case come to, taken in turns, each on fragments of its own."""
    count, learners, registered = CASES[name]
    per_sample = count * len(AT_LEAST)
    ledger = open_ledger(parts.ledger_url)
    run_name = f"run-{count}"
    console.print(f"{name}: signing {samples * per_sample * learners} envelopes …")
    rates: dict[str, list[float]] = {side: [] for side in (*AT_LEAST, BARE)}
    with free_payloads():
        run = waiting(
            parts, ledger, run_name,
            fragments=samples * per_sample, learners=learners, registered=registered,
        )  # fmt: skip
        frames = [run.signed(fragment) for fragment in range(samples * per_sample)]
        for sample in range(samples):
            for turn, side in enumerate(AT_LEAST):
                first = sample * per_sample + turn * count
                fragments = range(first, first + count)
                waits = {fragment: frames[fragment] for fragment in fragments}
                with signatures_believed(side == BELIEVED):
                    rates[side].append(round(count * learners / aggregator(run, waits), 1))
            rates[BARE].append(round(count * learners / bare.take(run_name, fragments), 1))
            shown = ", ".join(f"{side} {found[-1]:,.0f}" for side, found in rates.items())
            console.print(f"  {sample + 1}/{samples}: {shown} envelopes/s")
    ledger.close()
    facts = {
        "unit": "envelopes/s",
        "envelopes_per_sample": count * learners,
        "bytes_per_envelope": round(statistics.mean(map(len, frames[0]))),
    }
    found = {
        f"intake, {name}, {side}": compared(
            {side: rates[side], BARE: rates[BARE]},
            times(side, BARE),
            at_least=None if registered else least,
            **facts,
        )
        for side, least in AT_LEAST.items()
    }
    asked = {CHECKED: rates[CHECKED], "asked": [PER_SECOND_AT_LEAST]}
    found[f"intake, {name}, a second"] = compared(asked, times(CHECKED, "asked"), at_least=1.0, **facts)
    return found


def main(samples: Samples = 5, as_json: AsJson = False, record: Record = False) -> None:
    """How many envelopes an aggregator takes in per second. Progress goes to stderr."""
    facts = where("bench-intake")
    rows: dict[str, Row] = {}
    with running(s3=False, postgres=True) as parts:
        bare = Bare(parts)
        for name in CASES:
            rows |= measured(parts, bare, name, samples)
        bare.close()
    result = facts | {"batch_entries": BATCH_ENTRIES, "rows": rows}
    deliver("intake", result, title="Intake", as_json=as_json, record=record)


if __name__ == "__main__":
    typer.run(main)
