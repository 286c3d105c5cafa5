"""Killing a mutant: in a copy of the tree, with the copy's code before all other, its killer runs once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mutants.mutant import MAX_SEEDS, ROOT, SIMULATOR, Mutant

COPIED = (
    "shared",
    "services",
    "migrations",
    "tests",
    "docker",
    "docs",
    "pyproject.toml",
    "Makefile",
    "README.md",
)
#: Seconds after which a killer that still runs counts as having noticed nothing.
LIMIT_SECONDS = 3_600


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `seeds` is how many the simulator needed."""

    mutant: Mutant
    killed: bool
    words: str
    seeds: int | None
    seconds: float


def kill(mutant: Mutant, seeds: int = MAX_SEEDS) -> Verdict:
    """Applies the mutant to a copy of the tree and lets its killer look for it, the simulator with `seeds`.

    A killer that cannot run has noticed nothing, and the verdict says why.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in COPIED:
            _copy(ROOT / name, copy / name)
        (copy / "shared/deltapost/migrations").symlink_to(copy / "migrations")
        mutant.apply(copy)
        try:
            if mutant.killer == SIMULATOR:
                killed, words, needed = _simulate(copy, seeds)
            else:
                killed, words, needed = _test(mutant, copy)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            last = str(error).strip().splitlines()[-1]
            killed, words, needed = False, f"could not be judged: {last:.200}", None
    return Verdict(mutant, killed, words, needed, time.monotonic() - started)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns(
            "__pycache__", "*.egg-info", "migrations" if source.name == "shared" else ""
        )
        shutil.copytree(source, target, ignore=ignored)
    else:
        shutil.copy(source, target)


def _run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(copy / name) for name in ("shared", "services", "tests"))
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def _simulate(copy: Path, seeds: int) -> tuple[bool, str, int | None]:
    done = _run(copy, "mutants.playing", str(seeds))
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"the simulator did not run: {done.stderr[-2000:]}")
    said = json.loads(lines[-1])
    return said["failure"] is not None, said["failure"] or "nothing noticed", said["seeds"]


def _test(mutant: Mutant, copy: Path) -> tuple[bool, str, int | None]:
    done = _run(copy, "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.killer)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode == 1 and failed:
        return True, failed[0].removeprefix("FAILED ").split(" - ")[0].split("::", 1)[-1], None
    if done.returncode == 0:
        return False, "its tests pass", None
    raise RuntimeError(f"{mutant.killer} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
