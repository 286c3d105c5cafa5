"""Sweeps: the three passes over a round's tensors, in between which only scalars are computed.

First every delta's squared norm; then each tensor's deltas made one, with the sums that cosines need; then
outer step, commit and anchor together. `algorithms.closing` decides what happens in between, in float64, so
any implementation of the passes leads to the same bytes: `ValueSweeps` does them one `Value` operation after
the other on any backend, `adapters.native_sweeps` in one C call each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltapost.serialization.tensor import TensorBytes


@dataclass(frozen=True)
class Combination:
    """How a tensor's N deltas become one, the base: Σ cᵢvᵢ by `coefficients`, or, where there are none, for
    each element its sorted values without the lowest and highest `trim`, added in ascending order."""

    coefficients: tuple[float, ...] | None
    trim: int = 0


@dataclass(frozen=True)
class Merged:
    """Sums over one tensor, by the reduction tree: ‖base‖², ‖Σ vᵢ/‖vᵢ‖‖² and each ⟨vᵢ, base⟩."""

    squared: float
    unit_squared: float
    dots: tuple[float, ...]


@dataclass(frozen=True)
class Outer:
    """The outer step of a whole round. `final`: the merged deltas are taken as they are."""

    lr: float
    beta: float
    final: bool


@dataclass(frozen=True)
class Stepped:
    """What a round leaves behind: anchor, outer state and, where commits carry one, the update's entries."""

    theta: Mapping[str, TensorBytes]
    outer: Mapping[str, TensorBytes]
    update: Mapping[str, TensorBytes] | None


class Sweeps(Protocol):
    """The passes over one round's tensors, in this order, each once. Tensors by name, learners by id."""

    def squares(self) -> list[list[float]]:
        """[tensor][learner]: ‖v‖², by the reduction tree; not finite where the delta is not."""

    def merge(self, combinations: Sequence[Combination], norms: Sequence[float]) -> list[Merged]:
        """Makes each tensor's deltas one. `norms` are the deltas' over the whole fragment.

        Raises NonFinite for a coefficient past float32.
        """

    def step(self, factors: Sequence[float | None], outer: Outer) -> Stepped:
        """Moves masters by the bases, each times its factor, and publishes.

        None: as it is; 0: the merged delta is +0. Raises NonFinite, naming the first tensor whose momentum,
        master, update or anchor is not finite.
        """
