"""Shrinking: a failing seed again and again with fewer faults, as long as it still fails the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from simulator.running import Outcome, run_seed

#: How a fault is numbered where it is told: `(c3)` struck a call, `(p1)` was planned.
_NUMBER = re.compile(r"\(([cp][0-9]+)\)")


def shrink(found: Outcome, *, seconds: float, tell: Callable[[str], None]) -> tuple[Outcome, frozenset[str]]:
    """The shortest failing outcome that `seconds` sufficed to find, and the faults it does without."""
    deadline = time.monotonic() + seconds
    skipped: frozenset[str] = frozenset()
    numbers = _numbers(found)
    size = max(1, len(numbers) // 2)
    while numbers and time.monotonic() < deadline:
        for start in range(0, len(numbers), size):
            tried = skipped | set(numbers[start : start + size])
            outcome = run_seed(found.seed, skipped=tried)
            if same(outcome, found):
                tell(f"still fails without {len(tried)} of its faults, at turn {outcome.turns}")
                found, skipped = outcome, frozenset(tried)
                break
            if time.monotonic() >= deadline:
                return found, skipped
        else:
            if size == 1:
                return found, skipped
            size = max(1, size // 2)
        numbers = _numbers(found)
        size = min(size, max(1, len(numbers)))
    return found, skipped


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes fail in the same way: in the same words, but for names, numbers and hashes."""
    return _words(one.failure) == _words(other.failure)


def _words(failure: str | None) -> str:
    return re.sub(r"[0-9a-f]{6,}|[0-9]+", "#", failure or "")[:40]


def _numbers(outcome: Outcome) -> list[str]:
    return [number for line in outcome.happened for number in _NUMBER.findall(line)]
