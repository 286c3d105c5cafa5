"""How much the deltas of a round agree, in one pass over them instead of one per pair.

With unit vectors uᵢ = vᵢ/‖vᵢ‖ over the whole fragment, Σ over pairs of ⟨uᵢ, uⱼ⟩ is (‖Σu‖² - n₊)/2, n₊ being
the number of non-zero deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from deltapost.adapters.sweeps import Merged


def _clamped(cosine: float) -> float:
    return max(-1.0, min(1.0, cosine))


class Agreement:
    """Gathers one round's cosines, tensor by tensor in name order, learners in id order."""

    def __init__(self, norms: Sequence[float]) -> None:
        """`norms` are the deltas' over the whole fragment."""
        self._norms = list(norms)
        self._moved = [index for index, norm in enumerate(norms) if norm > 0]
        self._unit_sum = 0.0
        self._merged = 0.0
        self._dots = [0.0] * len(self._norms)

    def add(self, merged: Merged, factor: float | None) -> None:
        """Takes one tensor's sums: its merged delta is the base times `factor`."""
        times = 1.0 if factor is None else factor
        self._unit_sum += merged.unit_squared
        self._merged += times * times * merged.squared
        for index in self._moved:
            self._dots[index] += times * merged.dots[index]

    def mean(self) -> float | None:
        """The mean cosine over pairs, a pair with a zero delta counting 0; None with fewer than two."""
        count = len(self._norms)
        if count < 2:
            return None
        return _clamped((self._unit_sum - len(self._moved)) / (count * (count - 1)))

    def with_merged(self) -> list[float]:
        """Each delta's cosine with the merged one; 0 when either is zero."""
        merged = sqrt(self._merged)
        if not merged > 0:
            return [0.0] * len(self._norms)
        return [
            _clamped(dot / (norm * merged)) if norm > 0 else 0.0
            for norm, dot in zip(self._norms, self._dots, strict=True)
        ]
