"""Anchors outside a round: the state a fragment starts from, and the anchor that an update leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltapost.adapters import Backend
from deltapost.algorithms.rounds import FragmentState
from deltapost.codecs import Codec
from deltapost.serialization.schema import MOMENTUM_PREFIX, ParameterSpec
from deltapost.serialization.tensor import TensorBytes


def genesis_state(specs: Sequence[ParameterSpec], theta: Mapping[str, TensorBytes]) -> FragmentState:
    """Version 0: the genesis anchor with momentum +0. A master comes with the first round that needs one."""
    outer = {
        f"{MOMENTUM_PREFIX}{spec.name}": TensorBytes("F32", spec.shape, bytes(4 * spec.elements))
        for spec in specs
    }
    return FragmentState(version=0, theta=theta, outer=outer)


def apply_update(
    specs: Sequence[ParameterSpec],
    theta: Mapping[str, TensorBytes],
    update: Mapping[str, TensorBytes],
    commit: Codec,
    backend: Backend,
) -> dict[str, TensorBytes]:
    """The next anchor from the one before and a round's update: what `outer.publish` made, byte for byte."""
    moved = {}
    for spec in specs:
        entries = {entry: update[entry] for entry in commit.entries(spec)}
        commit.check(spec, entries)
        value = backend.load(theta[spec.name]) + commit.decode(spec, entries, backend)
        moved[spec.name] = value.to_bytes(spec.dtype)
    return moved
