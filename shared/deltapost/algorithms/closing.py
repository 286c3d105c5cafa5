"""close_round: a fragment's state and a round's contributions in, its next state out; nothing else matters.

Two sweeps over the tensors: the first takes every delta's norm, which weights and cosines need over the
whole fragment; the second merges, steps and publishes one tensor at a time, so that no more than one
tensor's deltas are held as float32 at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite, sqrt
from operator import add
from typing import TYPE_CHECKING

from deltapost import codecs
from deltapost.adapters import Backend, Value
from deltapost.algorithms.cosines import Agreement
from deltapost.algorithms.inputs import check_contributions, check_state
from deltapost.algorithms.outer import nesterov, publish
from deltapost.algorithms.rounds import Contribution, FragmentState, Participant, RoundResult
from deltapost.algorithms.rules import merge_scales, merge_tensor, merge_weights
from deltapost.errors import ConfigurationError, NonFinite
from deltapost.serialization.schema import MASTER_PREFIX, MOMENTUM_PREFIX, ParameterSpec, Schema
from deltapost.serialization.tensor import TensorBytes

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
        squares = [self._squared_norms(spec, ordered) for spec in self._specs]
        norms = [sqrt(reduce(add, of_learner)) for of_learner in zip(*squares, strict=True)]
        agreement = Agreement(norms)
        scales = merge_scales(self.config.merge, norms)
        next_state, update = self._step(state, ordered, weights, scales, squares, agreement)
        cosine, cosines = agreement.mean(), agreement.with_merged()
        if not all(map(isfinite, [cosine or 0.0, *cosines])):
            raise NonFinite(f"the cosines of version {next_state.version} are not finite")
        participants = tuple(
            Participant(one.learner, one.local_step, one.steps, one.tokens, share, norm=norm, cosine=agrees)
            for one, share, norm, agrees in zip(ordered, weights, norms, cosines, strict=True)
        )
        return RoundResult(next_state, participants, cosine, update)

    def _step(
        self,
        state: FragmentState,
        ordered: Sequence[Contribution],
        weights: Sequence[float],
        scales: Sequence[float],
        squared_norms: Sequence[Sequence[float]],
        agreement: Agreement,
    ) -> tuple[FragmentState, dict[str, TensorBytes] | None]:
        """The second sweep: merge, move the master, publish. Returns the next state and the update."""
        final = all(one.final for one in ordered)
        commit = None if self.config.commit_dtype is None else codecs.get(self.config.commit_dtype)
        theta: dict[str, TensorBytes] = {}
        outer: dict[str, TensorBytes] = {}
        update: dict[str, TensorBytes] = {}
        for spec, squares in zip(self._specs, squared_norms, strict=True):
            deltas = [self._delta(one, spec) for one in ordered]
            norms = [sqrt(square) for square in squares]
            merged = merge_tensor(self.config.merge, spec.name, deltas, weights, norms, scales)
            agreement.add(deltas, merged)
            old_momentum = state.outer[MOMENTUM_PREFIX + spec.name]
            master = self.backend.load(state.outer.get(MASTER_PREFIX + spec.name, state.theta[spec.name]))
            if final:
                # The last deltas are taken as they are: η would leave a part of them behind for good.
                master, momentum_bytes = master - merged, _own(old_momentum)
            else:
                momentum = self.backend.load(old_momentum)
                master, momentum = nesterov(
                    master, momentum, merged, lr=self.config.outer_lr, beta=self.config.outer_momentum
                )
                _refuse_non_finite(momentum, f"the momentum of {spec.name!r}")
                momentum_bytes = momentum.to_bytes("F32")
            _refuse_non_finite(master, f"the master of {spec.name!r}")
            published = publish(spec, state.theta[spec.name], master, commit, self.backend)
            theta[spec.name] = published.anchor
            if spec.dtype != "F32" or commit is not None:
                _refuse_non_finite(self.backend.load(published.anchor), f"the anchor of {spec.name!r}")
            outer[MOMENTUM_PREFIX + spec.name] = momentum_bytes
            if self._keeps_master(spec):
                outer[MASTER_PREFIX + spec.name] = master.to_bytes("F32")
            update.update(published.update or {})
        return FragmentState(state.version + 1, theta, outer), None if commit is None else update

    def _squared_norms(self, spec: ParameterSpec, ordered: Sequence[Contribution]) -> list[float]:
        """The first sweep, for one tensor: each learner's ‖v‖²."""
        squares = [self._delta(one, spec).squared_norm() for one in ordered]
        for one, square in zip(ordered, squares, strict=True):
            if not isfinite(square):
                raise NonFinite(f"the delta of {spec.name!r} from {one.learner!r} has no finite norm")
        return squares

    def _delta(self, contribution: Contribution, spec: ParameterSpec) -> Value:
        """A contribution's delta of one tensor, at whatever precision its entries are."""
        codec = codecs.get(contribution.tensors[spec.name].dtype)
        return codec.decode(spec, contribution.tensors, self.backend)

    def _keeps_master(self, spec: ParameterSpec) -> bool:
        """Whether the anchor can differ from the master: it is narrower, or follows a narrower update."""
        return spec.dtype != "F32" or self.config.commit_dtype is not None


def _refuse_non_finite(value: Value, what: str) -> None:
    if not value.is_finite():
        raise NonFinite(f"{what} is not finite")


def _own(tensor: TensorBytes) -> TensorBytes:
    """The tensor with its data as bytes, not a view of somebody's buffer."""
    return TensorBytes(tensor.dtype, tensor.shape, bytes(tensor.data))
