"""`make bench-intake`: envelopes that an aggregator takes in per second, beside a bare loop.

    python benchmarks/intake.py [--samples N] [--json] [--record]

Valkey and Postgres are real, and so are the envelopes, which all wait in their streams when a sample begins.
An aggregator's `FragmentWorker.step` reads, checks, judges and writes them, once with signatures checked and
once with every signature believed; payloads cost nothing. The bare loop reads the same entries, as many at a
time, inserts a row of the same widths for each with one `executemany` and commits with the new position: it
looks at nothing. The sides take turns; a ratio is of the median rates.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import psycopg
import redis
import typer
from envelopes import Waiting, free_payloads, signatures_believed, waiting
from facts import keep, where
from parts import Parts, running
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table

from deltapost.ledger.engine import open_ledger
from deltapost.limits import WORKER_THREADS
from deltapost.serialization.names import envelope_stream
from deltapost.streams import START
from deltapost_aggregator.caution import BATCH_ENTRIES
from deltapost_aggregator.context import Health
from deltapost_aggregator.pool import Next, Pool
from deltapost_aggregator.worker import FragmentWorker

#: Each row: fragments that one sample fills, learners of each, and whether the run is a registered one.
ROWS: dict[str, tuple[int, int, bool]] = {
    "1 fragment, 2,048 learners": (1, 2_048, False),
    "16 fragments, 128 learners, registered": (16, 128, True),
}
#: Of the bare loop's rate, at least; and envelopes per second with signatures, at least.
AT_LEAST = {"signatures checked": 0.3, "signatures believed": 0.5}
PER_SECOND_AT_LEAST = 1_500

COLUMNS = (
    "run, envelope, fragment, version, learner, message, payload_sha256, payload_size, local_step, steps, "
    "tokens, step_seconds, loss, metrics, final, verdict, deliveries, entry_id, stream_epoch, received_at"
)


class Serving:
    """One fragment, stepped by a pool's threads until nothing of it waits."""

    def __init__(self, context: Waiting, fragment: int, done: Callable[[], None]) -> None:
        self.name = f"fragment {fragment}"
        self._worker, self._done = FragmentWorker(context.context, fragment), done

    def step(self) -> Next:
        if self._worker.step() != "idle":
            return "again"
        self._done()
        return "done"


def aggregator(run: Waiting, fragments: Sequence[int]) -> float:
    """Seconds until an aggregator has taken in what waits in these fragments' streams."""
    pool, left, idle = Pool(Health()), [len(fragments)], threading.Event()

    def done() -> None:
        left[0] -= 1
        if not left[0]:
            idle.set()

    for fragment in fragments:
        pool.add(Serving(run, fragment, done))
    threads = [threading.Thread(target=pool.serve) for _ in range(min(WORKER_THREADS, len(fragments)))]
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


def measured(parts: Parts, bare: Bare, name: str, samples: int, console: Console) -> dict[str, Any]:
    """The rates of all sides in one row, taken in turns, each on fragments of its own."""
    count, learners, registered = ROWS[name]
    per_sample = count * len(AT_LEAST)
    ledger = open_ledger(parts.ledger_url)
    run_name = f"run-{count}"
    console.print(f"{name}: signing {samples * per_sample * learners} envelopes …")
    rates: dict[str, list[float]] = {side: [] for side in (*AT_LEAST, "bare loop")}
    with free_payloads():
        run = waiting(
            parts, ledger, run_name,
            fragments=samples * per_sample, learners=learners, registered=registered,
        )  # fmt: skip
        sizes = [run.fill(fragment) for fragment in range(samples * per_sample)]
        for sample in range(samples):
            for turn, side in enumerate(AT_LEAST):
                first = sample * per_sample + turn * count
                fragments = range(first, first + count)
                with signatures_believed(side == "signatures believed"):
                    rates[side].append(count * learners / aggregator(run, fragments))
            rates["bare loop"].append(count * learners / bare.take(run_name, fragments))
            shown = ", ".join(f"{side} {found[-1]:,.0f}" for side, found in rates.items())
            console.print(f"  {sample + 1}/{samples}: {shown} envelopes/s")
    ledger.close()
    medians = {side: statistics.median(found) for side, found in rates.items()}
    return {
        "envelopes_per_sample": count * learners,
        "bytes_per_envelope": round(sum(sizes) / len(sizes) / learners),
        "per_second": {side: [round(each, 1) for each in found] for side, found in rates.items()},
        "medians": {side: round(each, 1) for side, each in medians.items()},
        "ratios": {side: round(medians[side] / medians["bare loop"], 3) for side in AT_LEAST},
    }


def main(
    samples: Annotated[int, typer.Option(min=1, help="Turns of each side in each row.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write it to records/.")] = False,
) -> None:
    """How many envelopes an aggregator takes in per second. Progress goes to stderr."""
    console = Console(stderr=True)
    with running(s3=False, postgres=True) as parts:
        bare = Bare(parts)
        rows = {name: measured(parts, bare, name, samples, console) for name in ROWS}
        bare.close()
    result = where("bench-intake") | {
        "batch_entries": BATCH_ENTRIES,
        "at_least": AT_LEAST | {"per_second": PER_SECOND_AT_LEAST},
        "rows": rows,
    }
    if record:
        console.print(f"written to {keep('intake', result)}")
    if as_json:
        print(json.dumps(result))
        return
    table = Table("waiting", "side", "envelopes/s", "of the bare loop", "at least", title="Intake")
    for name, row in rows.items():
        for side, rate in row["medians"].items():
            ratio, least = row["ratios"].get(side), AT_LEAST.get(side)
            table.add_row(name, side, f"{rate:,.0f}", f"{ratio:.2f}" if ratio else "", f"{least or ''}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
