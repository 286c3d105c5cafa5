"""Closes rounds with gradientmail 0.0.2, in a Python of its own: one line of JSON in, seconds out.

Input is what `rounds.py` made, as numpy files that both sides read; each side encodes it by itself.
"""

import json
import sys
import time

import numpy as np
import torch
from gradientmail.adapters.torch import TorchBackend
from gradientmail.algorithms import Contribution, FragmentState, encoded
from gradientmail.algorithms.diloco import DiLoCo, DiLoCoAggregator, Rda, WeightedMean
from gradientmail.serialization import ParameterSpec, Schema, TensorBytes

given = json.loads(sys.argv[1])
torch.set_num_threads(given["threads"])
backend = TorchBackend()
values = np.load(given["file"])
elements, delta = given["elements"], given["delta"]
specs = tuple(ParameterSpec(f"t{i:04}", "F32", (elements,)) for i in range(given["tensors"]))
schema = Schema(specs)
config = DiLoCo(
    sync_every=100,
    fragments=1,
    in_flight=1,
    merge=Rda() if given["merge"] == "rda" else WeightedMean(),
    delta_dtype=delta,
    commit_dtype=given["commit"],
)


def entries(row, scale):
    value = backend.load(TensorBytes("F32", (elements,), (row * np.float32(scale)).tobytes()))
    found = encoded("x", value, "F32", delta)
    return {name: bytes(tensor.data) for name, tensor in found.items()}, found


contributions = []
for learner in range(given["learners"]):
    _, kinds = entries(np.roll(values[1], 7 * learner), 0.5 + learner / 8)
    tensors = {
        spec.name + name[1:]: TensorBytes(tensor.dtype, tensor.shape, bytes(bytearray(tensor.data)))
        for spec in specs
        for name, tensor in kinds.items()
    }
    contributions.append(Contribution(f"l{learner:03}", 10, 10, 1_000 + learner, 1.0, False, tensors))
state = FragmentState(
    0, {spec.name: TensorBytes("F32", (elements,), values[0].tobytes()) for spec in specs}, {}
)
aggregator = DiLoCoAggregator(config, schema, schema_names := [spec.name for spec in specs], backend)
state = aggregator.close_round(state, contributions).state
print("ready", flush=True)
for _line in sys.stdin:
    started = time.perf_counter()
    result = aggregator.close_round(state, contributions)
    print(time.perf_counter() - started, flush=True)
    del result
