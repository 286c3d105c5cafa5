"""A round for gradientmail 0.0.2, in a Python of its own: its aggregator, contributions and state."""

import torch
from gradientmail.adapters.torch import TorchBackend
from gradientmail.algorithms import Contribution, FragmentState, encoded
from gradientmail.algorithms.diloco import DiLoCo, DiLoCoAggregator, Rda, WeightedMean
from gradientmail.serialization import ParameterSpec, Schema, TensorBytes
from memory import resident
from numbers_of_a_round import ANCHOR, NAMES, by_tensor, delta
from serving import GIVEN

#: MB before the round is there.
BEFORE = resident()

torch.set_num_threads(GIVEN["threads"])
backend = TorchBackend()
shape = (GIVEN["elements"],)
config = DiLoCo(
    sync_every=100,
    fragments=1,
    in_flight=1,
    merge=Rda() if GIVEN["merge"] == "rda" else WeightedMean(),
    delta_dtype=GIVEN["delta"],
    commit_dtype=GIVEN["commit"],
)


def contribution(learner):
    value = backend.load(TensorBytes("F32", shape, delta(learner).tobytes()))
    tensors = by_tensor(
        encoded("x", value, "F32", GIVEN["delta"]),
        lambda one: TensorBytes(one.dtype, one.shape, bytes(bytearray(one.data))),
    )
    return Contribution(f"l{learner:03}", 10, 10, 1_000 + learner, 1.0, False, tensors)


contributions = [contribution(learner) for learner in range(GIVEN["learners"])]
schema = Schema(tuple(ParameterSpec(name, "F32", shape) for name in NAMES))
aggregator = DiLoCoAggregator(config, schema, NAMES, backend)
theta = {name: TensorBytes("F32", shape, ANCHOR.tobytes()) for name in NAMES}
state = aggregator.close_round(FragmentState(0, theta, {}), contributions).state
