"""close_round: a fragment's state and a round's contributions in, its next state out; nothing else matters.

Three sweeps over the tensors (`adapters.sweeps`), with scalars in between: norms, which merge and cosines
need over the whole fragment; the merge; outer step, commit and anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite, sqrt
from operator import add
from typing import TYPE_CHECKING

from deltapost import codecs
from deltapost.adapters import Backend
from deltapost.adapters.native_sweeps import native_sweeps
from deltapost.adapters.sweeps import Outer, Sweeps
from deltapost.algorithms.cosines import Agreement
from deltapost.algorithms.inputs import check_contributions, check_state
from deltapost.algorithms.rounds import Contribution, FragmentState, Participant, RoundResult
from deltapost.algorithms.rules import merge_plan, merge_scales, merge_weights
from deltapost.algorithms.value_sweeps import ValueSweeps
from deltapost.codecs import Codec
from deltapost.errors import ConfigurationError, NonFinite
from deltapost.serialization.schema import ParameterSpec, Schema

if TYPE_CHECKING:
    from deltapost.algorithms.diloco import DiLoCo


@dataclass(frozen=True)
class DiLoCoAggregator:
    """Closes the rounds of the fragment that holds the parameters `names`. See `algorithms.Aggregator`."""

    config: DiLoCo
    schema: Schema
    names: Sequence[str]
    backend: Backend
    _specs: tuple[ParameterSpec, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = tuple(sorted(set(self.names)))
        if not names or len(names) != len(self.names):
            raise ConfigurationError(
                f"a fragment has one or more parameters, each once, not {self.names!r:.200}"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "_specs", self.schema.select(names))

    def close_round(self, state: FragmentState, contributions: Sequence[Contribution]) -> RoundResult:
        """The next state, with everything the round's record needs.

        Deterministic: contributions are merged in the order of learner ids, whatever order they come in.
        Raises ConfigurationError for none, two of one learner or one without weight; SchemaMismatch for
        entries that are not the fragment's; NonFinite when a delta's norm or the result is not finite.
        """
        ordered = sorted(contributions, key=lambda one: one.learner)
        check_contributions(self._specs, ordered)
        check_state(self._specs, [spec.name for spec in self._specs if self._keeps_master(spec)], state)
        weights = merge_weights(self.config.merge, ordered, self.config.weight_share_cap)
        commit = None if self.config.commit_dtype is None else codecs.get(self.config.commit_dtype)
        sweeps = self._sweeps(state, ordered, commit)
        squares = sweeps.squares()
        self._refuse_non_finite(squares, ordered)
        norms = [sqrt(reduce(add, of_learner)) for of_learner in zip(*squares, strict=True)]
        scales = merge_scales(self.config.merge, norms)
        plans = [
            merge_plan(self.config.merge, spec.name, weights, [sqrt(square) for square in of_tensor], scales)
            for spec, of_tensor in zip(self._specs, squares, strict=True)
        ]
        agreement, factors = Agreement(norms), []
        for plan, merged in zip(
            plans, sweeps.merge([plan.combination for plan in plans], norms), strict=True
        ):
            factors.append(plan.factor(merged.squared))
            agreement.add(merged, factors[-1])
        final = all(one.final for one in ordered)
        stepped = sweeps.step(factors, Outer(self.config.outer_lr, self.config.outer_momentum, final))
        next_state = FragmentState(state.version + 1, stepped.theta, stepped.outer)
        cosine, cosines = agreement.mean(), agreement.with_merged()
        if not all(map(isfinite, [cosine or 0.0, *cosines])):
            raise NonFinite(f"the cosines of version {next_state.version} are not finite")
        participants = tuple(
            Participant(one.learner, one.local_step, one.steps, one.tokens, share, norm=norm, cosine=agrees)
            for one, share, norm, agrees in zip(ordered, weights, norms, cosines, strict=True)
        )
        return RoundResult(next_state, participants, cosine, stepped.update)

    def _sweeps(self, state: FragmentState, ordered: Sequence[Contribution], commit: Codec | None) -> Sweeps:
        """The backend's own passes over checked inputs, where it has some; else one operation at a time."""
        own = native_sweeps(
            self.backend,
            self._specs,
            state.theta,
            state.outer,
            [one.tensors for one in ordered],
            self.config.commit_dtype,
        )
        return own or ValueSweeps(self.backend, self._specs, state, ordered, commit)

    def _refuse_non_finite(self, squares: Sequence[Sequence[float]], ordered: Sequence[Contribution]) -> None:
        for spec, of_tensor in zip(self._specs, squares, strict=True):
            for one, square in zip(ordered, of_tensor, strict=True):
                if not isfinite(square):
                    raise NonFinite(f"the delta of {spec.name!r} from {one.learner!r} has no finite norm")

    def _keeps_master(self, spec: ParameterSpec) -> bool:
        """Whether the anchor can differ from the master: it is narrower, or follows a narrower update."""
        return spec.dtype != "F32" or self.config.commit_dtype is not None
