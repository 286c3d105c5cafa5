"""A round for deltapost: its aggregator, contributions and state."""

from __future__ import annotations

from memory import resident
from numbers_of_a_round import ANCHOR, NAMES, by_tensor, delta
from serving import GIVEN

from deltapost import codecs
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Contribution
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.diloco import DiLoCo, Rda, WeightedMean
from deltapost.serialization import ParameterSpec, Schema, TensorBytes

#: MB before the round is there.
BEFORE = resident()

backend = NativeBackend(threads=GIVEN["threads"])
shape = (GIVEN["elements"],)
config = DiLoCo.decoupled(
    fragments=1,
    in_flight=1,
    merge=Rda() if GIVEN["merge"] == "rda" else WeightedMean(),
    delta_dtype=GIVEN["delta"],
    commit_dtype=GIVEN["commit"],
)


def contribution(learner: int) -> Contribution:
    value = backend.load(TensorBytes("F32", shape, delta(learner).tobytes()))
    tensors = by_tensor(
        codecs.get(GIVEN["delta"]).encode("x", value),
        lambda one: TensorBytes(one.dtype, one.shape, bytes(bytearray(one.data))),
    )
    return Contribution(f"l{learner:03}", 10, 10, 1_000 + learner, 1.0, False, tensors)


contributions = [contribution(learner) for learner in range(GIVEN["learners"])]
specs = [ParameterSpec(name, "F32", shape) for name in NAMES]
aggregator = config.aggregator(Schema(tuple(specs)), NAMES, backend)
theta = {name: TensorBytes("F32", shape, ANCHOR.tobytes()) for name in NAMES}
state = aggregator.close_round(genesis_state(specs, theta), contributions).state
