"""What a round is and how it closes: pure functions of values, without clock, store or stream."""

from __future__ import annotations

from typing import Final

from deltapost.algorithms.rounds import Aggregator, Contribution, FragmentState, Participant, RoundResult

__all__ = [
    "ARITHMETIC_VERSION",
    "Aggregator",
    "Contribution",
    "FragmentState",
    "Participant",
    "RoundResult",
]

#: The version of `docs/exactness.md` that this release computes. Part of every manifest.
ARITHMETIC_VERSION: Final = 1
