"""The outer step: how a merged delta moves a tensor's master, and how the anchor follows its master."""

from __future__ import annotations

from dataclasses import dataclass

from deltapost.adapters import Backend, Value
from deltapost.codecs import Codec
from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import TensorBytes


def nesterov(theta: Value, momentum: Value, delta: Value, *, lr: float, beta: float) -> tuple[Value, Value]:
    """Nesterov momentum as DiLoCo uses it: m ← βm + Δ, Θ ← Θ - η(Δ + βm). Returns (Θ, m)."""
    momentum = momentum * beta + delta
    return theta - (delta + momentum * beta) * lr, momentum


@dataclass(frozen=True)
class Publication:
    """What a round publishes of one tensor: the anchor and, where commits carry one, the update's entries."""

    anchor: TensorBytes
    update: dict[str, TensorBytes] | None


def publish(
    spec: ParameterSpec, old_anchor: TensorBytes, master: Value, commit: Codec | None, backend: Backend
) -> Publication:
    """The anchor that follows `master`.

    Without a commit codec: the master in the schema's dtype. With one: the update is the new master minus
    the old anchor, encoded, and the anchor is the old one plus the update as it decodes, in the schema's
    dtype, so that whoever has the old anchor and the update has the new anchor.
    """
    if commit is None:
        return Publication(master.to_bytes(spec.dtype), None)
    old = backend.load(old_anchor)
    update = commit.encode(spec.name, master - old)
    moved = old + commit.decode(spec, update, backend)
    return Publication(moved.to_bytes(spec.dtype), update)
