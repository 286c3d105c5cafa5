"""What a training loop is told of a fragment, and what is counted of it in between."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Aligned:
    """A fragment of the model that now holds `version`. `merged`: this learner's delta is in it.

    None where this learner had published nothing for that round.
    """

    fragment: int
    version: int
    merged: bool | None
    bytes_read: int


@dataclass
class Progress:
    """A fragment's counters since its parameters were last aligned, and the step of its last publish."""

    version: int
    steps: int = 0
    tokens: int = 0
    published_step: int = 0
