"""What the benchmarks share: sides that take turns, medians, rows with their targets, JSON, table and record.

Every benchmark writes `build/bench/NAME.json`, with `--record` also `records/DATE-NAME.json`. A row of it
holds the samples of both sides in seconds, their medians and the ratio of these; `at_least` or `at_most` is
what the ratio has to reach, `aim` what it should; `unit` says what was counted instead of seconds. Sides are
compared in one interleaved run, so that what else the machine does meets both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from bandwidth import Limit
from facts import keep
from rich.console import Console
from rich.table import Table

WORKERS = Path(__file__).parent / "workers"
OUTPUT = Path(__file__).parents[1] / "build" / "bench"

Row: TypeAlias = dict[str, Any]

Samples = Annotated[int, typer.Option(min=1, help="Measurements of each side in each row.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each side.")]
Scale = Annotated[float, typer.Option(min=1e-6, max=1.0, help="Part of the elements to measure with.")]
PeerPython = Annotated[str, typer.Option(help="The Python that makes the peer's environment.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Record = Annotated[bool, typer.Option("--record", help="Write the result to records/ too.")]

#: Progress goes to stderr, results to stdout.
console = Console(stderr=True)


class Worker:
    """A side in a process of its own: it says `ready` once it can begin, then seconds for each turn."""

    def __init__(self, python: Path | str, script: str, given: Mapping[str, Any]) -> None:
        self._name = script
        self._process = subprocess.Popen(
            [python, WORKERS / f"{script}.py", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        """Waits until it can begin."""
        if self._answer() != "ready":
            sys.exit(f"the worker {self._name} did not start: see above")

    def __call__(self) -> float:
        """Seconds of one turn."""
        return float(self.ask("turn"))

    def ask(self, line: str) -> str:
        """What it answers to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer:
            sys.exit(f"the worker {self._name} broke down: see above")
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def workers(
    given: Mapping[str, Any], sides: Mapping[str, tuple[Path | str, str]]
) -> Iterator[dict[str, Worker]]:
    """A worker for each side, from its Python and script; all ready, one made ready after the other."""
    with ExitStack() as stack:
        started = {}
        for name, (python, script) in sides.items():
            started[name] = Worker(python, script, given)
            stack.callback(started[name].stop)
            started[name].ready()
        yield started


def in_turns(sides: Mapping[str, Callable[[], float]], samples: int) -> dict[str, list[float]]:
    """Seconds of each side, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(samples):
        for name, side in sides.items():
            seconds[name].append(round(side(), 6))
    return seconds


def compared(
    seconds: Mapping[str, list[float]],
    ratio: Callable[[Mapping[str, float]], float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    aim: float | None = None,
    **facts: Any,
) -> Row:
    """A row: the samples, their medians, `ratio` of the medians, and what it has to reach."""
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    limits = {"at_least": at_least, "at_most": at_most, "aim": aim}
    return {
        "seconds": dict(seconds),
        "medians": medians,
        "ratio": _rounded(ratio(medians)),
        **{name: value for name, value in limits.items() if value is not None},
        **facts,
    }


def times(over: str, under: str) -> Callable[[Mapping[str, float]], float]:
    """How many times as long as `under` the side `over` takes."""
    return lambda medians: medians[over] / medians[under]


def over_limit(
    seconds: Mapping[str, list[float]],
    limit: Limit,
    side: str,
    *,
    at_most: float | None = None,
    aim: float | None = None,
) -> Row:
    """A row of how many times as long as the bandwidth limit a side takes."""
    row = compared(seconds, lambda medians: medians[side] / limit.seconds(medians), at_most=at_most, aim=aim)
    rate = round(limit.rate(row["medians"]) / 1e9, 1)
    return row | {"bytes": round(limit.touched), "triad_gb_per_second": rate}


def reached(row: Row) -> bool:
    """Whether a row's ratio is what it has to be at least, or at most."""
    at_least, at_most = row.get("at_least"), row.get("at_most")
    enough = at_least is None or row["ratio"] >= at_least
    return bool(enough and (at_most is None or row["ratio"] <= at_most))


def wanted(row: Row) -> str:
    """A row's limit and aim in words; nothing for a row that is only told."""
    limits = [f"{sign} {row[name]:g}" for name, sign in (("at_least", "≥"), ("at_most", "≤")) if name in row]
    return " ".join([*limits, *([f"({row['aim']:g})"] if "aim" in row else [])])


def deliver(name: str, result: dict[str, Any], *, title: str, as_json: bool, record: bool) -> None:
    """Writes the result where results go, and prints its rows as JSON or as a table."""
    write(name, result, record=record)
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
        return
    table = Table("row", "seconds (medians)", "ratio", "wanted (aim)", "", title=title)
    for row_name, row in result["rows"].items():
        medians = ", ".join(f"{side} {seconds:.3g}" for side, seconds in row["medians"].items())
        verdict = "" if reached(row) else "missed"
        table.add_row(row_name, medians, f"{row['ratio']:g}", wanted(row), verdict)
    Console().print(table)


def write(name: str, result: dict[str, Any], *, record: bool) -> None:
    """Writes the result to `build/bench`, and with `record` beside the other records."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    (OUTPUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if record:
        console.print(f"written to {keep(name, result)}")


def _rounded(ratio: float) -> float:
    """Two digits behind the point for small ratios, one for large ones."""
    return round(ratio, 2 if ratio < 10 else 1)
