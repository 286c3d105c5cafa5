"""Means: how the deltas of several learners become one by their weights. Coefficients are rounded once.

The order of float32 operations is arithmetic version 1, written down in `docs/exactness.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Final

from deltapost.adapters import Value
from deltapost.adapters.floats import to_float32
from deltapost.adapters.sweeps import Combination
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


@dataclass(frozen=True)
class MergePlan:
    """How a tensor's deltas become the merged one: a base, then times a factor, as far as there is one.

    The factor is fixed, or `radius` over the base's norm (0 where the base is shorter than what rounding
    leaves of directions that cancel).
    """

    combination: Combination
    fixed: float | None = None
    radius: float | None = None

    def factor(self, squared: float) -> float | None:
        """The factor, as float32 has it, of a base with this squared norm. Raises NonFinite past float32."""
        factor = self.fixed
        if self.radius is not None:
            length = sqrt(squared)
            factor = 0.0 if length < SMALLEST_DIRECTION else self.radius / length
        return None if factor is None else to_float32(factor)


def mean_plan(weights: Sequence[float], scales: Sequence[float] | None = None) -> MergePlan:
    """Σ wᵢsᵢvᵢ / Σ wᵢ. `scales` are 1 where none are given."""
    shares = normalized(weights)
    factors = _or_ones(scales, shares)
    coefficients = tuple(share * scale for share, scale in zip(shares, factors, strict=True))
    return MergePlan(Combination(coefficients))


def rda_plan(
    weights: Sequence[float], norms: Sequence[float], scales: Sequence[float] | None = None
) -> MergePlan:
    """Radial-direction averaging: the mean of the norms along the mean of the directions, of the sᵢvᵢ."""
    shares = normalized(weights)
    factors = _or_ones(scales, shares)
    scaled = [factor * length for factor, length in zip(factors, norms, strict=True)]
    coefficients = tuple(
        share * factor / max(length, SMALLEST_NORM)
        for share, factor, length in zip(shares, factors, scaled, strict=True)
    )
    radius = fsum(share * norm for share, norm in zip(shares, scaled, strict=True))
    return MergePlan(Combination(coefficients), radius=radius)


def merged(values: Sequence[Value], plan: MergePlan) -> Value:
    """The merged delta of one tensor."""
    base = combined(values, plan.combination)
    return scaled(base, plan.factor(base.squared_norm() if plan.radius is not None else 0.0))


def combined(values: Sequence[Value], combination: Combination) -> Value:
    """The base of one tensor."""
    if combination.coefficients is not None:
        return combine(values, combination.coefficients)
    first, *rest = values
    return first.middle_sum(rest, combination.trim)


def scaled(base: Value, factor: float | None) -> Value:
    """The base times its factor; +0 where that is 0."""
    if factor is None:
        return base
    return base * factor if factor else base.zeros_like()


def weighted_mean(values: Sequence[Value], weights: Sequence[float]) -> Value:
    """Σ wᵢvᵢ / Σ wᵢ."""
    return merged(values, mean_plan(weights))


def rda(values: Sequence[Value], weights: Sequence[float], norms: Sequence[float] | None = None) -> Value:
    """Radial-direction averaging. Zeros when the directions cancel. `norms` saves computing ‖vᵢ‖ again."""
    lengths = [value.norm() for value in values] if norms is None else norms
    return merged(values, rda_plan(weights, lengths))


def _or_ones(scales: Sequence[float] | None, like: Sequence[float]) -> Sequence[float]:
    return [1.0] * len(like) if scales is None else scales
