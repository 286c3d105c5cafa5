"""Merges: how the deltas of several learners become one. Coefficients are Python floats, rounded once.

The order of float32 operations is arithmetic version 1, written down in `docs/exactness.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import ClassVar, Final, Literal, TypeAlias

from deltapost.adapters import Value
from deltapost.errors import ConfigurationError

#: Below this norm a delta's direction counts as shorter than a unit vector: φ(x) = x / max(‖x‖, this).
SMALLEST_NORM: Final = 1e-12
#: Directions whose weighted mean is shorter than this cancel; what is left is rounding noise.
SMALLEST_DIRECTION: Final = 1e-6
#: Tensors whose lower-cased name contains this are merged by their weighted mean under RDA too.
EMBEDDING_MARK: Final = "embed"


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


def weighted_mean(values: Sequence[Value], weights: Sequence[float]) -> Value:
    """Σ wᵢvᵢ / Σ wᵢ."""
    return combine(values, normalized(weights))


def rda(values: Sequence[Value], weights: Sequence[float], norms: Sequence[float] | None = None) -> Value:
    """Radial-direction averaging: the mean of the norms along the mean of the directions.

    Weights every mean by `weights`. Zeros when the directions cancel. `norms` saves computing ‖vᵢ‖ again.
    """
    shares = normalized(weights)
    lengths = [value.norm() for value in values] if norms is None else list(norms)
    pairs = list(zip(shares, lengths, strict=True))
    direction = combine(values, [share / max(length, SMALLEST_NORM) for share, length in pairs])
    length = direction.norm()
    if length < SMALLEST_DIRECTION:
        return direction.zeros_like()
    return direction * (fsum(share * norm for share, norm in pairs) / length)


@dataclass(frozen=True)
class WeightedMean:
    """Merges every tensor by its weighted mean."""

    rule: ClassVar[Literal["weighted_mean"]] = "weighted_mean"


@dataclass(frozen=True)
class Rda:
    """Merges by radial-direction averaging, embeddings (`embed` in the name) by their weighted mean."""

    rule: ClassVar[Literal["rda"]] = "rda"


Merge: TypeAlias = Rda | WeightedMean
MERGES: Final[dict[str, type[Rda] | type[WeightedMean]]] = {cls.rule: cls for cls in (Rda, WeightedMean)}


def merge_tensor(
    rule: Merge, name: str, deltas: Sequence[Value], weights: Sequence[float], norms: Sequence[float]
) -> Value:
    """The merged delta of the tensor `name` by `rule`; `norms` are those of `deltas`."""
    if isinstance(rule, WeightedMean) or EMBEDDING_MARK in name.lower():
        return weighted_mean(deltas, weights)
    return rda(deltas, weights, norms)
