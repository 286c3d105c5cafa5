"""ValueSweeps: a round's passes over any backend's values, one operation after the other: the reference.

No more than one tensor's deltas are held as float32 at once, besides the merged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltapost import codecs
from deltapost.adapters import Backend, Value
from deltapost.adapters.sweeps import Combination, Merged, Outer, Stepped
from deltapost.algorithms.merges import combine, combined, scaled
from deltapost.algorithms.outer import nesterov, publish
from deltapost.algorithms.rounds import Contribution, FragmentState
from deltapost.codecs import Codec
from deltapost.errors import NonFinite
from deltapost.serialization.schema import MASTER_PREFIX, MOMENTUM_PREFIX, ParameterSpec
from deltapost.serialization.tensor import TensorBytes


class _Stepped(NamedTuple):
    """What was made so far, tensor by tensor."""

    theta: dict[str, TensorBytes]
    outer: dict[str, TensorBytes]
    update: dict[str, TensorBytes]


class ValueSweeps:
    """See `adapters.sweeps.Sweeps`."""

    def __init__(
        self,
        backend: Backend,
        specs: Sequence[ParameterSpec],
        state: FragmentState,
        ordered: Sequence[Contribution],
        commit: Codec | None,
    ) -> None:
        self._backend = backend
        self._specs = specs
        self._state = state
        self._ordered = ordered
        self._commit = commit
        self._bases: list[Value] = []

    def squares(self) -> list[list[float]]:
        return [[self._delta(one, spec).squared_norm() for one in self._ordered] for spec in self._specs]

    def merge(self, combinations: Sequence[Combination], norms: Sequence[float]) -> list[Merged]:
        found = []
        moved = [index for index, norm in enumerate(norms) if norm > 0]
        for spec, combination in zip(self._specs, combinations, strict=True):
            deltas = [self._delta(one, spec) for one in self._ordered]
            base = combined(deltas, combination)
            self._bases.append(base)
            units = 0.0
            if moved:
                units = combine(
                    [deltas[index] for index in moved], [1 / norms[index] for index in moved]
                ).squared_norm()
            found.append(Merged(base.squared_norm(), units, tuple(delta.dot(base) for delta in deltas)))
        return found

    def step(self, factors: Sequence[float | None], outer: Outer) -> Stepped:
        into = _Stepped({}, {}, {})
        for spec, base, factor in zip(self._specs, self._bases, factors, strict=True):
            self._step(spec, scaled(base, factor), outer, into)
        return Stepped(into.theta, into.outer, None if self._commit is None else into.update)

    def _step(self, spec: ParameterSpec, merged: Value, outer: Outer, into: _Stepped) -> None:
        state = self._state
        old_momentum = state.outer[MOMENTUM_PREFIX + spec.name]
        master = self._backend.load(state.outer.get(MASTER_PREFIX + spec.name, state.theta[spec.name]))
        if outer.final:
            # The last deltas are taken as they are: η would leave a part of them behind for good.
            master, momentum_bytes = master - merged, _own(old_momentum)
        else:
            momentum = self._backend.load(old_momentum)
            master, momentum = nesterov(master, momentum, merged, lr=outer.lr, beta=outer.beta)
            _refuse_non_finite(momentum, f"the momentum of {spec.name!r}")
            momentum_bytes = momentum.to_bytes("F32")
        _refuse_non_finite(master, f"the master of {spec.name!r}")
        published = publish(spec, state.theta[spec.name], master, self._commit, self._backend)
        into.theta[spec.name] = published.anchor
        keeps_master = spec.dtype != "F32" or self._commit is not None
        if keeps_master:
            _refuse_non_finite(self._backend.load(published.anchor), f"the anchor of {spec.name!r}")
        into.outer[MOMENTUM_PREFIX + spec.name] = momentum_bytes
        if keeps_master:
            into.outer[MASTER_PREFIX + spec.name] = master.to_bytes("F32")
        into.update.update(published.update or {})

    def _delta(self, contribution: Contribution, spec: ParameterSpec) -> Value:
        """A contribution's delta of one tensor, at whatever precision its entries are."""
        codec = codecs.get(contribution.tensors[spec.name].dtype)
        return codec.decode(spec, contribution.tensors, self._backend)


def _refuse_non_finite(value: Value, what: str) -> None:
    if not value.is_finite():
        raise NonFinite(f"{what} is not finite")


def _own(tensor: TensorBytes) -> TensorBytes:
    """The tensor with its data as bytes, not a view of somebody's buffer."""
    return TensorBytes(tensor.dtype, tensor.shape, bytes(tensor.data))
