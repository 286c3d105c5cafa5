"""Means: how the deltas of several learners become one by their weights. Coefficients are rounded once.

The order of float32 operations is arithmetic version 1, written down in `docs/exactness.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Final

from deltapost.adapters import Value
from deltapost.errors import ConfigurationError

#: Below this norm a delta's direction counts as shorter than a unit vector: φ(x) = x / max(‖x‖, this).
SMALLEST_NORM: Final = 1e-12
#: Directions whose weighted mean is shorter than this cancel; what is left is rounding noise.
SMALLEST_DIRECTION: Final = 1e-6


def weight(tokens: int, steps: int) -> float:
    """A contribution's weight, tokens² / steps: squared in exact integers, divided with one rounding.

    >>> weight(3, 2)
    4.5
    """
    return tokens * tokens / steps


def capped_weights(weights: Sequence[float], share: float | None) -> list[float]:
    """`weights`, each at most `share` of the sum of the uncapped ones; unchanged when `share` is None."""
    if share is None:
        return list(weights)
    cap = share * fsum(weights)
    return [min(value, cap) for value in weights]


def normalized(weights: Sequence[float]) -> list[float]:
    """`weights` over their exact sum. Raises ConfigurationError when there is no positive sum."""
    # Never sum(): Python 3.12 changed its result.
    total = fsum(weights)
    if not total > 0:
        raise ConfigurationError(f"{len(weights)} contributions have a total weight of {total}")
    return [value / total for value in weights]


def combine(values: Sequence[Value], coefficients: Sequence[float]) -> Value:
    """Σ cᵢvᵢ in the order given: each product and each sum rounded to float32, the first product as it is."""
    pairs = zip(values, coefficients, strict=True)
    first, coefficient = next(pairs)
    total = first * coefficient
    for value, coefficient in pairs:
        total = total + value * coefficient
    return total


def weighted_mean(
    values: Sequence[Value], weights: Sequence[float], scales: Sequence[float] | None = None
) -> Value:
    """Σ wᵢsᵢvᵢ / Σ wᵢ. `scales` are 1 where none are given."""
    shares = normalized(weights)
    return combine(
        values, [share * scale for share, scale in zip(shares, _or_ones(scales, shares), strict=True)]
    )


def rda(
    values: Sequence[Value],
    weights: Sequence[float],
    norms: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
) -> Value:
    """Radial-direction averaging: the mean of the norms along the mean of the directions, of the sᵢvᵢ.

    Weights every mean by `weights`. Zeros when the directions cancel. `norms` saves computing ‖vᵢ‖ again;
    `scales` are 1 where none are given.
    """
    shares = normalized(weights)
    factors = _or_ones(scales, shares)
    lengths = [value.norm() for value in values] if norms is None else norms
    scaled = [factor * length for factor, length in zip(factors, lengths, strict=True)]
    direction = combine(
        values,
        [
            share * factor / max(length, SMALLEST_NORM)
            for share, factor, length in zip(shares, factors, scaled, strict=True)
        ],
    )
    length = direction.norm()
    if length < SMALLEST_DIRECTION:
        return direction.zeros_like()
    return direction * (fsum(share * norm for share, norm in zip(shares, scaled, strict=True)) / length)


def _or_ones(scales: Sequence[float] | None, like: Sequence[float]) -> Sequence[float]:
    return [1.0] * len(like) if scales is None else scales
