"""`make bench`: the benchmarks whose rows stand in README's table, one after the other.

    python benchmarks/every.py [--samples N] [--threads N] [--scale PART] [--record]

Each runs as its own target runs it, with the same arguments. Fails where one broke down; a target that is
missed is said in its table and fails nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

#: In the order of README's table. One that is added here is in `make bench` and in the table.
BENCHMARKS = ("close", "limit", "files", "mean", "encode", "announcement", "job", "intake")
#: In the table, but run only by their own target: they take minutes.
LONG = ("billion",)
#: In `make bench`, without a row.
CURVES = ("curves",)


def main(arguments: list[str]) -> int:
    """The exit status: 0 when all ran to their end."""
    console = Console(stderr=True)
    seconds, broken = {}, []
    for name in BENCHMARKS + CURVES:
        started = time.monotonic()
        program = Path(__file__).with_name(f"{name}.py")
        done = subprocess.run([sys.executable, program, *arguments], check=False)
        seconds[name] = time.monotonic() - started
        if done.returncode:
            broken.append(name)
    spent = ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items())
    console.print(f"{sum(seconds.values()) / 60:.1f} minutes: {spent}")
    if broken:
        console.print(f"broke down: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
