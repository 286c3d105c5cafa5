"""`make bench-close`: how long deltapost takes to close a round, beside gradientmail 0.0.2.

    python benchmarks/close.py [--samples N] [--threads N] [--peer-python PATH] [--json] [--record]

Both sides hold the same round's payloads in memory, each in a process of its own, and take turns; every
sample is one whole `close_round` with its checks. A ratio is of the medians.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from facts import keep, where
from peers import python_of
from rich.console import Console
from rich.table import Table

WORKERS = Path(__file__).parent / "workers"
PEER = "gradientmail==0.0.2"
LARGE = {"elements": 4_194_304, "tensors": 6, "learners": 8}
#: Each row's round, and the ratio that it has to reach at least.
ROWS: dict[str, tuple[dict[str, Any], float]] = {
    "F4, 25M in 6, N=8": (LARGE | {"delta": "F4"}, 15.0),
    "F8_E4M3, 25M in 6, N=8": (LARGE | {"delta": "F8_E4M3"}, 7.0),
    "BF16, 25M in 6, N=8": (LARGE | {"delta": "BF16"}, 5.0),
    "F32, 25M in 6, N=8": (LARGE | {"delta": "F32"}, 4.0),
    "F4, 4M, N=64": ({"elements": 4_194_304, "tensors": 1, "learners": 64, "delta": "F4"}, 45.0),
    "F4, 384 of 16K, N=8": ({"elements": 16_384, "tensors": 384, "learners": 8, "delta": "F4"}, 12.0),
}


class Worker:
    """One side's process: it says `ready` once the round is in its memory, then seconds for each line."""

    def __init__(self, python: Path | str, name: str, given: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [python, WORKERS / f"close_{name}.py", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._answer() != "ready":
            sys.exit(f"the worker of {name} did not start: see above")

    def close(self) -> float:
        """Seconds of one close."""
        assert self._process.stdin is not None
        self._process.stdin.write("close\n")
        self._process.stdin.flush()
        return float(self._answer())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measured(python: Path, given: dict[str, Any], samples: int) -> dict[str, Any]:
    """Both sides' seconds, taken in turns."""
    sides = {"deltapost": Worker(sys.executable, "deltapost", given)}
    try:
        sides["gradientmail"] = Worker(python, "gradientmail", given)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(samples):
            for name, side in sides.items():
                seconds[name].append(round(side.close(), 4))
    finally:
        for side in sides.values():
            side.stop()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "seconds": seconds,
        "medians": medians,
        "ratio": round(medians["gradientmail"] / medians["deltapost"], 1),
    }


def main(
    samples: Annotated[int, typer.Option(min=1, help="Closes of each side in each row.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each side.")] = 2,
    peer_python: Annotated[str, typer.Option(help="A Python from 3.12 on, for the peer.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Write it to records/.")] = False,
) -> None:
    """How long a round takes to close, beside gradientmail. Progress goes to stderr."""
    console = Console(stderr=True)
    python = python_of(PEER, python=peer_python or None, console=console)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (given, least) in ROWS.items():
            file = Path(directory) / "values.npy"
            values = np.random.default_rng(0).standard_normal((2, given["elements"]), dtype=np.float32)
            np.save(file, 0.01 * values)
            settings = given | {"file": str(file), "merge": "rda", "commit": "BF16", "threads": threads}
            rows[name] = measured(python, settings, samples) | {"at_least": least}
            console.print(f"{name}: {rows[name]['ratio']} times")
    result = where("bench-close") | {"peer": PEER, "threads": threads, "rows": rows}
    if record:
        console.print(f"written to {keep('close', result)}")
    if as_json:
        print(json.dumps(result))
        return
    table = Table("round", "deltapost s", "gradientmail s", "ratio", "at least", title="Closing a round")
    for name, row in rows.items():
        seconds = (f"{row['medians'][side]:.3f}" for side in ("deltapost", "gradientmail"))
        table.add_row(name, *seconds, f"{row['ratio']:.1f}", f"{row['at_least']:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
