"""The values a round takes and returns. Nothing here computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from deltapost.serialization.tensor import TensorBytes


@dataclass(frozen=True)
class Contribution:
    """One learner's delta of a fragment for one round, `anchor - θ`, with its counters.

    `local_step` is where the learner's clock stood, `steps` and `tokens` what it trained since its last
    contribution merged, `step_seconds` its mean step. `tensors` are the payload's entries, at whatever
    precision they came; the mapping may read them lazily, and is read more than once.
    """

    learner: str
    local_step: int
    steps: int
    tokens: int
    step_seconds: float
    final: bool
    tensors: Mapping[str, TensorBytes] = field(repr=False)


@dataclass(frozen=True)
class FragmentState:
    """A fragment between rounds: its version, anchor (by parameter name) and outer state.

    `outer` holds `momentum.NAME` in F32 for each parameter, and `master.NAME` in F32 where the anchor does
    not hold the master itself.
    """

    version: int
    theta: Mapping[str, TensorBytes] = field(repr=False)
    outer: Mapping[str, TensorBytes] = field(repr=False)


@dataclass(frozen=True)
class Participant:
    """What the round made of one contribution.

    `weight` is as merged, always above 0: tokens² / steps after the share cap, or 1 where the merge counts
    each contribution once. `norm` is the delta's over the fragment, `cosine` its cosine with the merged
    delta, 0 when either is zero; both are observations outside comparison.
    """

    learner: str
    local_step: int
    steps: int
    tokens: int
    weight: float
    norm: float = field(default=0.0, compare=False, kw_only=True)
    cosine: float = field(default=0.0, compare=False, kw_only=True)


@dataclass(frozen=True)
class RoundResult:
    """A closed round: the fragment's next state, its participants by learner id, and the cosine.

    `cosine` is the mean over pairs of contributions, None with fewer than two. `update` holds the entries
    of the encoded update where commits carry one.
    """

    state: FragmentState
    participants: tuple[Participant, ...]
    cosine: float | None
    update: Mapping[str, TensorBytes] | None = field(default=None, repr=False)


@runtime_checkable
class Aggregator(Protocol):
    """Closes rounds of one fragment: a pure function of state and contributions."""

    def close_round(self, state: FragmentState, contributions: Sequence[Contribution]) -> RoundResult:
        """The state after merging `contributions` by learner id, whatever order they come in."""
