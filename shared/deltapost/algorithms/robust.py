"""Merges that survive liars: norm clipping to the median norm, coordinate-wise trimmed mean and median.

The order of float32 operations is arithmetic version 1, written down in `docs/exactness.md`; which of them
withstands which lie is measured in `docs/liars.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltapost.adapters import Value
from deltapost.adapters.sweeps import Combination
from deltapost.algorithms.merges import MergePlan, merged


def clip_scales(norms: Sequence[float]) -> list[float]:
    """What scales each delta down to the median of `norms`, those of the deltas over the fragment: at most 1.

    The median of an even number is the lower of the middle two: one that a delta has, and that half of the
    learners, lying, cannot raise above every honest norm.

    >>> clip_scales([2.0, 1e6, 1.0, 4.0])
    [1.0, 2e-06, 1.0, 0.5]
    """
    median = sorted(norms)[(len(norms) - 1) // 2]
    return [median / norm if norm > median else 1.0 for norm in norms]


def trimmed_plan(count: int, trim: int) -> MergePlan:
    """Per element, the mean of `count` values without the `trim` lowest and highest; each counts once.

    With 2·`trim` values or fewer, the median. Source: Yin et al., 2018 (arXiv:1803.01498).
    """
    left_out = min(trim, (count - 1) // 2)
    return MergePlan(Combination(None, left_out), fixed=1 / (count - 2 * left_out))


def trimmed_mean(values: Sequence[Value], trim: int) -> Value:
    """The trimmed mean of values. See `trimmed_plan`."""
    return merged(values, trimmed_plan(len(values), trim))


def median(values: Sequence[Value]) -> Value:
    """Per element, the middle value; of an even number the mean of the middle two. Each counts once."""
    return trimmed_mean(values, len(values))
