"""What a round is given must be the fragment's, and complete: checked before anything is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from deltapost import codecs
from deltapost.algorithms.rounds import Contribution, FragmentState
from deltapost.errors import ConfigurationError, SchemaMismatch
from deltapost.serialization.schema import MASTER_PREFIX, MOMENTUM_PREFIX, ParameterSpec
from deltapost.serialization.tensor import DType, TensorBytes


def check_contributions(specs: Sequence[ParameterSpec], ordered: Sequence[Contribution]) -> None:
    """Contributions in learner order: at least one, one of each learner, with weight and exact entries.

    Raises ConfigurationError or SchemaMismatch, naming learner and entry.
    """
    if not ordered:
        raise ConfigurationError("a round closes with one contribution or more, not with none")
    for one, other in pairwise(ordered):
        if one.learner == other.learner:
            raise ConfigurationError(f"learner {one.learner!r} has two contributions to one round")
    for one in ordered:
        if one.steps < 1 or one.tokens < 1:
            raise ConfigurationError(
                f"learner {one.learner!r} has {one.steps} steps and {one.tokens} tokens: no weight"
            )
        _check_entries(specs, one)


def _check_entries(specs: Sequence[ParameterSpec], one: Contribution) -> None:
    what = f"contribution of {one.learner!r}"
    expected: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for spec in specs:
        if spec.name not in one.tensors:
            raise SchemaMismatch(f"the {what} lacks the entry {spec.name!r}")
        found = one.tensors[spec.name].dtype
        if found not in codecs.NAMES:
            raise SchemaMismatch(f"the {what} has {spec.name!r} as {found}, which no codec reads")
        expected |= codecs.get(found).entries(spec)
    _check_names(what, one.tensors, expected)
    for name, (dtype, shape) in expected.items():
        _check_tensor(f"{name!r} in the {what}", one.tensors[name], dtype, shape)


def check_state(specs: Sequence[ParameterSpec], with_master: Collection[str], state: FragmentState) -> None:
    """An anchor and outer state of exactly these parameters; masters only for those `with_master`.

    A state before its first round may lack masters: the anchor is the master then. Raises SchemaMismatch.
    """
    _check_names("anchor", state.theta, {spec.name for spec in specs})
    masters = {MASTER_PREFIX + name for name in with_master} & state.outer.keys()
    _check_names("outer state", state.outer, {MOMENTUM_PREFIX + spec.name for spec in specs} | masters)
    for spec in specs:
        _check_tensor(f"{spec.name!r} in the anchor", state.theta[spec.name], spec.dtype, spec.shape)
        for name in (MOMENTUM_PREFIX + spec.name, MASTER_PREFIX + spec.name):
            if name in state.outer:
                _check_tensor(f"{name!r} in the outer state", state.outer[name], "F32", spec.shape)


def _check_names(what: str, given: Collection[str], expected: Collection[str]) -> None:
    """Raises SchemaMismatch, naming the first entry of `given` that is missing or not the fragment's."""
    for name in sorted(set(expected) - set(given)):
        raise SchemaMismatch(f"the {what} lacks the entry {name!r}")
    for name in sorted(set(given) - set(expected)):
        raise SchemaMismatch(f"the {what} has an entry {name!r:.100} that is not the fragment's")


def _check_tensor(what: str, tensor: TensorBytes, dtype: str, shape: tuple[int, ...]) -> None:
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise SchemaMismatch(
            f"{what} is {tensor.dtype} of shape {tensor.shape}, expected {dtype} of shape {shape}"
        )
