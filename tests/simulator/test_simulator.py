"""The simulator itself: a seed is a story, the same each time, and what breaks a promise is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltapost.ledger import rounds
from deltapost_aggregator import announcer, closer
from simulator.running import run_seed
from simulator.shrinking import shrink

ROOT = Path(__file__).parents[2]
STORY = """
import hashlib, sys
from simulator.running import run_seed
outcome = run_seed(int(sys.argv[1]))
print(hashlib.sha256("\\n".join((*outcome.happened, *outcome.trace)).encode()).hexdigest())
"""


def story(seed: int, hash_seed: int) -> str:
    """What happened in a seed, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": "tests", "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(
        [sys.executable, "-c", STORY, str(seed)],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_a_seed_is_the_same_story_in_every_process() -> None:
    assert story(7, hash_seed=1) == story(7, hash_seed=2)


def test_two_seeds_are_two_stories() -> None:
    assert run_seed(7).happened != run_seed(8).happened


def _announce_nothing_new(self: Any, lease: Any, standing: Any) -> None:
    """An announcer that rings for a version nobody recorded."""
    self._append(
        announcer.CommitMessage(
            run=lease.run, fragment=lease.fragment, version=standing.head + 1, record=bytes(32)
        )
    )


def _no_objects(_store: Any, _key: str, _data: bytes) -> None:
    """Uploads nothing."""


BROKEN: list[tuple[Any, str, Callable[..., None], str]] = [
    (announcer.Announcer, "announce", _announce_nothing_new, "announced before its record"),
    (closer, "put_verified", _no_objects, "which is not there"),
    (rounds, "answer", lambda *_: None, "differ from the records'"),
]


@pytest.mark.parametrize(("home", "name", "broken", "words"), BROKEN, ids=[name for _, name, _, _ in BROKEN])
def test_a_broken_mechanism_is_noticed_in_the_first_rounds(
    monkeypatch: pytest.MonkeyPatch, home: Any, name: str, broken: Callable[..., None], words: str
) -> None:
    monkeypatch.setattr(home, name, broken)

    failures = [outcome.failure for seed in range(3) if (outcome := run_seed(seed)).failure]

    assert any(words in (failure or "") for failure in failures), failures


def test_a_failing_seed_is_told_with_fewer_faults_than_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closer, "put_verified", _no_objects)
    found = run_seed(0)
    told: list[str] = []

    short, skipped = shrink(found, seconds=20.0, tell=told.append)

    assert "which is not there" in (short.failure or "")
    assert len(short.happened) < len(found.happened)
    assert skipped
    assert run_seed(0, skipped=skipped).happened == short.happened
