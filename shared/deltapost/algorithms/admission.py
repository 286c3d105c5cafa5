"""Admission: which contributions may enter a round at all. Pure, and in the order that costs least.

Counters come first and need only the envelope; then the payload's layout, its values, and the delta's norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import isfinite, sqrt
from operator import add
from typing import TYPE_CHECKING, Literal

from deltapost.adapters.native_sweeps import native_sweeps
from deltapost.codecs import Codec
from deltapost.serialization.payload import unpack_expected
from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import TensorBytes

if TYPE_CHECKING:
    from deltapost.adapters import Backend
    from deltapost.algorithms.diloco import DiLoCo


def judge_counters(
    steps: int, tokens: int, config: DiLoCo
) -> Literal["zero_steps", "zero_weight", "outlier"] | None:
    """The verdict on a contribution's counters; None when they may enter.

    >>> from deltapost.algorithms.diloco import DiLoCo
    >>> judge_counters(10, 0, DiLoCo.standard())
    'zero_weight'
    """
    if steps < 1:
        return "zero_steps"
    if tokens < 1:
        return "zero_weight"
    if steps > config.max_steps or tokens > config.max_tokens_per_step * steps:
        return "outlier"
    return None


def check_payload(
    data: bytes | memoryview, specs: Sequence[ParameterSpec], codec: Codec
) -> dict[str, TensorBytes]:
    """The entries of a payload that holds these parameters, written by `codec`, with finite values only.

    Raises MalformedPayload, SchemaMismatch or NonFinite, naming the entry.
    """
    expected = {name: kind for spec in specs for name, kind in codec.entries(spec).items()}
    entries = unpack_expected(data, expected)
    for spec in specs:
        codec.check(spec, entries)
    return entries


def delta_norm(
    entries: Mapping[str, TensorBytes], specs: Sequence[ParameterSpec], codec: Codec, backend: Backend
) -> float:
    """The norm of a checked delta over its fragment, as the round will record it."""
    ordered = sorted(specs, key=lambda spec: spec.name)
    sweeps = native_sweeps(backend, ordered, {}, {}, [entries], None)
    if sweeps is not None:
        squares = [of_tensor[0] for of_tensor in sweeps.squares()]
    else:
        squares = [codec.decode(spec, entries, backend).squared_norm() for spec in ordered]
    return sqrt(reduce(add, squares, 0.0))


def judge_norm(norm: float, config: DiLoCo) -> Literal["non_finite", "outlier"] | None:
    """The verdict on a delta's norm; None when it may enter. A norm past float32's squares is not finite."""
    if not isfinite(norm):
        return "non_finite"
    if config.max_delta_norm is not None and norm > config.max_delta_norm:
        return "outlier"
    return None
