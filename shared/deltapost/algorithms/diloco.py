"""DiLoCo: every setting of the algorithm in one value, which travels in the manifest and back unchanged.

The outer step is that of DiLoCo (arXiv:2311.08105) with the fragments of Streaming DiLoCo (arXiv:2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Final

from deltapost import codecs
from deltapost.adapters import Backend
from deltapost.algorithms.closing import DiLoCoAggregator
from deltapost.algorithms.merges import rda, weighted_mean
from deltapost.algorithms.outer import nesterov
from deltapost.algorithms.rules import (
    MERGES,
    Median,
    Merge,
    NormClipped,
    Rda,
    TrimmedMean,
    WeightedMean,
    merge_from_fields,
    merge_to_fields,
)
from deltapost.errors import ConfigurationError
from deltapost.limits import (
    MAX_CHECKPOINT_EVERY,
    MAX_COUNTER,
    MAX_FRAGMENTS,
    MAX_STEPS,
    MAX_TOKENS_PER_STEP,
)
from deltapost.serialization.schema import Schema

__all__ = [
    "DiLoCo",
    "DiLoCoAggregator",
    "Median",
    "Merge",
    "NormClipped",
    "Rda",
    "TrimmedMean",
    "WeightedMean",
    "nesterov",
    "rda",
    "weighted_mean",
]

_TAG: Final = "diloco"


@dataclass(frozen=True)
class DiLoCo:
    """The settings of one run. Raises ConfigurationError, naming the setting, for values that cannot work.

    >>> config = DiLoCo(sync_every=100, fragments=4, in_flight=2, delta_dtype="F4")
    >>> DiLoCo.from_fields(config.to_fields()) == config
    True
    """

    #: Inner steps from one publication of a fragment to the next (H).
    sync_every: int
    #: Parts of the model that are synchronized at their own times (P).
    fragments: int
    #: Publications a learner may have outstanding (τ).
    in_flight: int
    #: Outer learning rate (η) and Nesterov momentum (β).
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    #: How deltas become one: a mean, or a rule that survives liars (docs/liars.md says which to choose when).
    merge: Merge = field(default_factory=Rda)
    #: The codec of contributions' deltas.
    delta_dtype: str = "F32"
    #: The codec of the update that commits carry; None publishes the anchor whole.
    commit_dtype: str | None = None
    #: Anchor and outer state are uploaded every so many versions, updates alone between; above 1 it needs a
    #: `commit_dtype`. Fewer bytes a round, more to fetch for joining and more to compute for a new owner.
    checkpoint_every: int = 1
    #: Steps after a publication before a learner waits for its commit; 0 at once, None never.
    overlap_steps: int | None = None
    #: Accepted contributions with which a round is ready, and with which a degraded one may close.
    quorum_size: int = 1
    min_quorum: int = 1
    #: Seconds a ready round waits for more; None adapts to the learners' pace.
    grace_seconds: float | None = None
    #: Seconds without a step after which a learner is not live; None is ten of its leases.
    stall_after_seconds: float | None = None
    #: The most of the total weight that one contribution may have, in (0, 1]; None is no cap.
    weight_share_cap: float | None = None
    #: Counters a contribution may claim; beyond them it is an `outlier`.
    max_steps: int = MAX_STEPS
    max_tokens_per_step: int = MAX_TOKENS_PER_STEP
    #: The largest norm of a delta over its fragment; beyond it is an `outlier`. None is no cap.
    max_delta_norm: float | None = None

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            self._integer(name)
        for name in _NUMBERS:
            self._number(name)
        if not isinstance(self.merge, tuple(MERGES.values())):
            names = ", ".join(cls.__name__ for cls in MERGES.values())
            raise ConfigurationError(f"merge is {type(self.merge).__name__}", hint=f"one of {names}")
        codecs.get(self.delta_dtype)
        if self.commit_dtype is not None:
            codecs.get(self.commit_dtype)
        elif self.checkpoint_every > 1:
            raise ConfigurationError(
                f"checkpoint_every={self.checkpoint_every} without a commit_dtype",
                hint="between checkpoints only updates are published: name their codec, or checkpoint always",
            )
        if not 1 <= self.in_flight <= self.fragments <= self.sync_every:
            raise ConfigurationError(
                f"in_flight={self.in_flight}, fragments={self.fragments}, sync_every={self.sync_every}",
                hint="1 <= in_flight <= fragments <= sync_every must hold",
            )
        if self.min_quorum > self.quorum_size:
            raise ConfigurationError(f"min_quorum={self.min_quorum} is above quorum_size={self.quorum_size}")

    def _integer(self, name: str) -> None:
        low, high, optional = _INTEGERS[name]
        value = getattr(self, name)
        if value is None and optional:
            return
        if type(value) is not int or not low <= value <= high:
            raise ConfigurationError(f"{name}={value!r:.40} is not an integer from {low} to {high}")

    def _number(self, name: str) -> None:
        low, high, optional = _NUMBERS[name]
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ConfigurationError(f"{name}={value!r:.40} is not a finite number")
        if not low <= value <= high or (value == 0 and name in _POSITIVE):
            bound = "above 0 and " if name in _POSITIVE else f"from {low:g} "
            raise ConfigurationError(f"{name}={value!r} is not {bound}at most {high:g}")
        object.__setattr__(self, name, float(value))

    def aggregator(self, schema: Schema, names: Sequence[str], backend: Backend) -> DiLoCoAggregator:
        """What closes the rounds of the fragment that holds the parameters `names`."""
        return DiLoCoAggregator(config=self, schema=schema, names=tuple(names), backend=backend)

    def to_fields(self) -> dict[str, Any]:
        """Plain values for the manifest: None, int, float, str and dict."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"algorithm": _TAG, **plain, "merge": merge_to_fields(self.merge)}

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> DiLoCo:
        """The settings that `to_fields` wrote. Raises ConfigurationError for anything more, less or else."""
        plain = dict(given)
        tag = plain.pop("algorithm", None)
        if tag != _TAG:
            raise ConfigurationError(f"the algorithm is {tag!r:.40}, expected {_TAG!r}")
        known = {one.name for one in fields(cls)}
        if plain.keys() != known:
            raise ConfigurationError(
                f"the settings of {_TAG} differ from this release's: "
                f"unknown {sorted(plain.keys() - known, key=str)}, missing {sorted(known - plain.keys())}"
            )
        return cls(**{**plain, "merge": merge_from_fields(plain["merge"])})

    @classmethod
    def standard(cls, sync_every: int = 500, **settings: Any) -> DiLoCo:
        """DiLoCo as published: the whole model at once, learners wait for the commit, weighted mean."""
        return cls._preset(settings, sync_every=sync_every, overlap_steps=0, merge=WeightedMean())

    @classmethod
    def streaming(cls, sync_every: int = 100, fragments: int = 4, **settings: Any) -> DiLoCo:
        """Streaming DiLoCo: fragment after fragment, in 4 bits, each commit awaited five steps later."""
        return cls._preset(
            settings,
            sync_every=sync_every,
            fragments=fragments,
            overlap_steps=5,
            merge=WeightedMean(),
            delta_dtype="F4",
        )

    @classmethod
    def decoupled(cls, sync_every: int = 100, fragments: int = 4, **settings: Any) -> DiLoCo:
        """Decoupled DiLoCo: nobody waits, all fragments may be in flight, RDA, 4 bits both ways."""
        return cls._preset(
            settings,
            sync_every=sync_every,
            fragments=fragments,
            in_flight=fragments,
            delta_dtype="F4",
            commit_dtype="F4",
        )

    @classmethod
    def local_sgd(cls, sync_every: int = 100, **settings: Any) -> DiLoCo:
        """Local SGD: the anchor becomes the weighted mean of the learners' parameters."""
        return cls._preset(
            settings,
            sync_every=sync_every,
            overlap_steps=0,
            outer_lr=1.0,
            outer_momentum=0.0,
            merge=WeightedMean(),
        )

    @classmethod
    def _preset(cls, settings: dict[str, Any], **preset: Any) -> DiLoCo:
        unknown = settings.keys() - {one.name for one in fields(cls)}
        if unknown:
            raise ConfigurationError(f"DiLoCo has no setting {sorted(unknown)[0]!r:.40}")
        return cls(**{"fragments": 1, "in_flight": 1, **preset, **settings})


#: Lowest and highest value of each integer setting, and whether it may be None.
_INTEGERS: Final[dict[str, tuple[int, int, bool]]] = {
    "sync_every": (1, MAX_COUNTER, False),
    "fragments": (1, MAX_FRAGMENTS, False),
    "in_flight": (1, MAX_FRAGMENTS, False),
    "overlap_steps": (0, MAX_COUNTER, True),
    "checkpoint_every": (1, MAX_CHECKPOINT_EVERY, False),
    "quorum_size": (1, MAX_COUNTER, False),
    "min_quorum": (1, MAX_COUNTER, False),
    "max_steps": (1, MAX_STEPS, False),
    "max_tokens_per_step": (1, MAX_TOKENS_PER_STEP, False),
}
#: The same of each number.
_NUMBERS: Final[dict[str, tuple[float, float, bool]]] = {
    "outer_lr": (0.0, 1e3, False),
    "outer_momentum": (0.0, 1.0, False),
    "grace_seconds": (0.0, 1e9, True),
    "stall_after_seconds": (0.0, 1e9, True),
    "weight_share_cap": (0.0, 1.0, True),
    "max_delta_norm": (0.0, 1e19, True),
}
#: Numbers that may not be zero.
_POSITIVE: Final = frozenset({"outer_lr", "stall_after_seconds", "weight_share_cap", "max_delta_norm"})
