"""Retain: how long the inputs and states of committed rounds are kept, and when it is worth letting go.

What a kept round needs to be run again: its deltas, and anchor and outer state of the version before it. So
letting go *through* version L takes the deltas and updates of the rounds that made versions 1 to L, and the
states of the versions before L; version L's own state stays, because round L + 1 starts from it. L is below
the head, so the newest state stays too, which is what learners catch up from. Records stay always.

L is a checkpoint: every version that is kept is computed from a checkpoint that is kept, by deltas and
updates that are kept. So with K = `checkpoint_every` up to K - 1 rounds more are kept than the policy says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from deltapost.errors import ConfigurationError

_FORM: Final = re.compile(r"(rounds)=([1-9][0-9]{0,8})|(days)=([0-9]{1,6}(?:\.[0-9]{1,6})?)")

#: Rounds are let go in spans of at least a quarter of what is kept: few notes, few passes.
KEPT_PER_SPAN: Final = 4


@dataclass(frozen=True)
class Retain:
    """Keep the newest `rounds` rounds of each fragment, or those committed in the last `days` days.

    >>> Retain.parse("rounds=100")
    Retain(rounds=100, days=None)
    """

    rounds: int | None = None
    days: float | None = None

    @classmethod
    def parse(cls, text: str) -> Retain:
        """Reads `rounds=K` or `days=D`. Raises ConfigurationError."""
        found = _FORM.fullmatch(text.strip())
        if found is None or (found[4] is not None and float(found[4]) == 0.0):
            raise ConfigurationError(
                f"{text!r:.80} says nothing that can be kept", hint="rounds=K or days=D, both above 0"
            )
        return cls(rounds=int(found[2])) if found[1] else cls(days=float(found[4]))

    def __str__(self) -> str:
        return f"rounds={self.rounds}" if self.rounds is not None else f"days={self.days:g}"


def worth_releasing(head: int, before: int, through: int) -> bool:
    """Whether going on from `before` to `through` lets go of a span, at this head."""
    return through - before >= max(1, (head - through) // KEPT_PER_SPAN)
