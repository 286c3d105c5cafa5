"""Closes rounds with deltapost: one line in, seconds out. Input as for the peer's worker."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from deltapost import codecs
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.diloco import DiLoCo, Rda, WeightedMean
from deltapost.serialization import ParameterSpec, Schema, TensorBytes

given = json.loads(sys.argv[1])
backend = NativeBackend(threads=given["threads"], level=given.get("level", "fastest"))
values = np.load(given["file"])
elements, delta = given["elements"], given["delta"]
specs = tuple(ParameterSpec(f"t{i:04}", "F32", (elements,)) for i in range(given["tensors"]))
schema = Schema(specs)
config = DiLoCo.decoupled(
    fragments=1,
    in_flight=1,
    merge=Rda() if given["merge"] == "rda" else WeightedMean(),
    delta_dtype=delta,
    commit_dtype=given["commit"],
)
codec = codecs.get(delta)
contributions = []
for learner in range(given["learners"]):
    row = np.roll(values[1], 7 * learner) * np.float32(0.5 + learner / 8)
    kinds = codec.encode("x", backend.load(TensorBytes("F32", (elements,), row.tobytes())))
    tensors = {
        spec.name + name[1:]: TensorBytes(tensor.dtype, tensor.shape, bytes(bytearray(tensor.data)))
        for spec in specs
        for name, tensor in kinds.items()
    }
    contributions.append(Contribution(f"l{learner:03}", 10, 10, 1_000 + learner, 1.0, False, tensors))
state = FragmentState(
    0,
    {spec.name: TensorBytes("F32", (elements,), values[0].tobytes()) for spec in specs},
    {f"momentum.{spec.name}": TensorBytes("F32", (elements,), bytes(4 * elements)) for spec in specs},
)
aggregator = config.aggregator(schema, schema.names, backend)
state = aggregator.close_round(state, contributions).state
print("ready", flush=True)
for _line in sys.stdin:
    started = time.perf_counter()
    result = aggregator.close_round(state, contributions)
    print(time.perf_counter() - started, flush=True)
    del result
