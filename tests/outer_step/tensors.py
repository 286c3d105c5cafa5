"""Backends, tensors and rounds that several tests of the outer step use."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Final

import numpy as np

from deltapost import codecs
from deltapost.adapters import Backend, Value
from deltapost.adapters.mlx import MlxBackend
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.torch import TorchBackend
from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.diloco import (
    DiLoCo,
    Median,
    Merge,
    NormClipped,
    Rda,
    TrimmedMean,
    WeightedMean,
)
from deltapost.serialization import DType, ParameterSpec, Schema, TensorBytes

BACKENDS: Final[dict[str, Backend]] = {
    "native": NativeBackend(),
    "numpy": NativeBackend(level="numpy"),
    "torch": TorchBackend(),
    "mlx": MlxBackend(),
}
EXACT: Final = ("native", "numpy", "torch")
RULES: Final[tuple[Merge, ...]] = (
    Rda(),
    WeightedMean(),
    NormClipped(),
    NormClipped(Rda()),
    TrimmedMean(1),
    Median(),
)
ODD_SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    (),
    (0,),
    (1,),
    (7,),
    (32,),
    (33,),
    (0, 3),
    (3, 5, 7),
    (4095,),
    (4096,),
    (4097,),
    (3, 4099),
)


def f32(*values: float, shape: tuple[int, ...] | None = None) -> TensorBytes:
    return TensorBytes("F32", shape or (len(values),), struct.pack(f"<{len(values)}f", *values))


def bits(*patterns: int) -> TensorBytes:
    return TensorBytes("F32", (len(patterns),), struct.pack(f"<{len(patterns)}I", *patterns))


def numbers(tensor: TensorBytes) -> list[float]:
    assert tensor.dtype == "F32"
    return list(struct.unpack(f"<{tensor.elements}f", tensor.data))


def values_of(value: Value) -> list[float]:
    return numbers(value.to_bytes("F32"))


@cache
def rough(shape: tuple[int, ...], seed: int, spread: int = 12) -> TensorBytes:
    """Numbers over many magnitudes, some zeros and negative zeros among them; the same in every release.

    Python promises the sequence of `random()`; numpy promises none of its own.
    """
    draw = random.Random(seed).random
    uniform = np.array([draw() for _ in range(3 * prod(shape))]).reshape(3, -1)
    exponents = np.floor(uniform[1] * (2 * spread + 1)).astype(np.int64) - spread
    values = np.ldexp(2 * uniform[0] - 1, exponents)
    values[uniform[2] < 0.06] = 0.0
    values[uniform[2] < 0.03] = -0.0
    return TensorBytes("F32", shape, values.astype("<f4").tobytes())


SPECS: Final = (
    ParameterSpec("block.weight", "BF16", (9, 17)),
    ParameterSpec("head.bias", "F32", ()),
    ParameterSpec("layer.weight", "F32", (4099,)),
    ParameterSpec("norm.weight", "F16", (33,)),
    ParameterSpec("tok_embed.weight", "F32", (3, 5, 7)),
)
SCHEMA: Final = Schema(SPECS)
LEARNERS: Final = ("amber", "birch", "cedar", "delta-9", "elm")


def config(**settings: object) -> DiLoCo:
    return DiLoCo(**{"sync_every": 10, "fragments": 1, "in_flight": 1, **settings})  # type: ignore[arg-type]


def first_state(schema: Schema = SCHEMA, seed: int = 1) -> FragmentState:
    native = NativeBackend()
    return FragmentState(
        version=0,
        theta={
            spec.name: native.load(rough(spec.shape, seed + i, 1)).to_bytes(spec.dtype)
            for i, spec in enumerate(schema)
        },
        outer={f"momentum.{s.name}": TensorBytes("F32", s.shape, bytes(4 * s.elements)) for s in schema},
    )


@cache
def delta(dtype: str, seed: int, schema: Schema = SCHEMA) -> Mapping[str, TensorBytes]:
    """One learner's delta of the whole schema, as the codec `dtype` writes it."""
    native, codec = NativeBackend(), codecs.get(dtype)
    tensors: dict[str, TensorBytes] = {}
    for i, spec in enumerate(schema):
        value = native.load(rough(spec.shape, 1000 * seed + i, 3)) * 0.01
        tensors.update(codec.encode(spec.name, value))
    return tensors


def contribution(
    learner: str,
    tensors: Mapping[str, TensorBytes],
    *,
    tokens: int = 1,
    steps: int = 1,
    final: bool = False,
) -> Contribution:
    return Contribution(learner, 40, steps, tokens, step_seconds=0.25, final=final, tensors=tensors)


def round_of(dtype: str, learners: Sequence[str] = LEARNERS) -> list[Contribution]:
    """A round with different counters and a different delta for each learner."""
    return [
        contribution(learner, delta(dtype, seed), tokens=1000 + 137 * seed, steps=3 + seed)
        for seed, learner in enumerate(learners, start=1)
    ]


def two_element_schema(dtype: DType = "F32", names: Sequence[str] = ("w",)) -> Schema:
    return Schema(tuple(ParameterSpec(name, dtype, (2,)) for name in names))  # type: ignore[arg-type]


def shuffled(seed: int, items: Sequence[Contribution]) -> list[Contribution]:
    copy = list(items)
    random.Random(seed).shuffle(copy)
    return copy
