"""Merge rules: the choice of how deltas become one, as a value that travels in the manifest.

A rule says what each contribution weighs, and merges one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, TypeAlias

from deltapost.algorithms.merges import MergePlan, capped_weights, mean_plan, rda_plan, weight
from deltapost.algorithms.robust import clip_scales, trimmed_plan
from deltapost.algorithms.rounds import Contribution
from deltapost.errors import ConfigurationError
from deltapost.limits import MAX_COUNTER

#: Tensors whose lower-cased name contains this are merged by their weighted mean under RDA too.
EMBEDDING_MARK: Final = "embed"


@dataclass(frozen=True)
class WeightedMean:
    """Merges every tensor by its weighted mean."""

    rule: ClassVar[Literal["weighted_mean"]] = "weighted_mean"


@dataclass(frozen=True)
class Rda:
    """Merges by radial-direction averaging, embeddings (`embed` in the name) by their weighted mean."""

    rule: ClassVar[Literal["rda"]] = "rda"


@dataclass(frozen=True)
class NormClipped:
    """Scales deltas longer than the round's median norm down to it, then merges by `base`.

    Norms are over the whole fragment, and so is the scale: embeddings are clipped with the rest. A learner's
    claimed tokens weigh as they do under `base`: cap them with `weight_share_cap`.
    """

    base: WeightedMean | Rda = field(default_factory=WeightedMean)

    rule: ClassVar[Literal["norm_clipped"]] = "norm_clipped"

    def __post_init__(self) -> None:
        if not isinstance(self.base, WeightedMean | Rda):
            raise ConfigurationError(
                f"norm clipping has the base {type(self.base).__name__}", hint="WeightedMean() or Rda()"
            )


@dataclass(frozen=True)
class TrimmedMean:
    """Per element, the mean of the deltas without the `trim` lowest and highest; embeddings like the rest.

    Withstands `trim` liars. Every contribution weighs 1 whatever it claims. A round of 2·`trim` contributions
    or fewer is merged by the median.
    """

    trim: int

    rule: ClassVar[Literal["trimmed_mean"]] = "trimmed_mean"

    def __post_init__(self) -> None:
        if type(self.trim) is not int or not 1 <= self.trim <= MAX_COUNTER:
            raise ConfigurationError(
                f"trim={self.trim!r:.40} is not an integer from 1 to {MAX_COUNTER}",
                hint="the number of liars a round has to withstand",
            )


@dataclass(frozen=True)
class Median:
    """Per element, the median of the deltas, of an even number the mean of the middle two; embeddings too.

    Withstands fewer than half. Every contribution weighs 1 whatever it claims.
    """

    rule: ClassVar[Literal["median"]] = "median"


Merge: TypeAlias = Rda | WeightedMean | NormClipped | TrimmedMean | Median
MERGES: Final[dict[str, type[Merge]]] = {
    cls.rule: cls for cls in (Rda, WeightedMean, NormClipped, TrimmedMean, Median)
}


def merge_weights(rule: Merge, contributions: Sequence[Contribution], share_cap: float | None) -> list[float]:
    """What each contribution weighs, always above 0: by its counters, capped; or 1 where each counts once."""
    if isinstance(rule, TrimmedMean | Median):
        return [1.0] * len(contributions)
    return capped_weights([weight(one.tokens, one.steps) for one in contributions], share_cap)


def merge_scales(rule: Merge, norms: Sequence[float]) -> list[float]:
    """What each delta is multiplied by before it is merged; `norms` are over the whole fragment."""
    return clip_scales(norms) if isinstance(rule, NormClipped) else [1.0] * len(norms)


def merge_plan(
    rule: Merge, name: str, weights: Sequence[float], norms: Sequence[float], scales: Sequence[float]
) -> MergePlan:
    """How the deltas of the tensor `name` become one; `norms` are the tensor's own, before scaling."""
    match rule:
        case TrimmedMean():
            return trimmed_plan(len(weights), rule.trim)
        case Median():
            return trimmed_plan(len(weights), len(weights))
    mean = rule.base if isinstance(rule, NormClipped) else rule
    if isinstance(mean, WeightedMean) or EMBEDDING_MARK in name.lower():
        return mean_plan(weights, scales)
    return rda_plan(weights, norms, scales)


def merge_to_fields(rule: Merge) -> dict[str, Any]:
    """Plain values for the manifest: the rule's name and its settings."""
    plain = {one.name: getattr(rule, one.name) for one in fields(rule)}
    if isinstance(rule, NormClipped):
        plain["base"] = merge_to_fields(rule.base)
    return {"rule": rule.rule, **plain}


def merge_from_fields(given: object) -> Merge:
    """The rule that `merge_to_fields` wrote. Raises ConfigurationError for anything more, less or else."""
    name = given.get("rule") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(name, str) or name not in MERGES:
        raise ConfigurationError(
            f"the merge is {given!r:.80}", hint=f"{{'rule': …}} with one of {', '.join(MERGES)}"
        )
    cls = MERGES[name]
    expected = {"rule"} | {one.name for one in fields(cls)}
    if given.keys() != expected:
        raise ConfigurationError(
            f"the merge {name!r} has the settings {sorted(given, key=str)}, expected {sorted(expected)}"
        )
    settings = {key: value for key, value in given.items() if key != "rule"}
    if "base" in settings:
        settings["base"] = merge_from_fields(settings["base"])
    return cls(**settings)
