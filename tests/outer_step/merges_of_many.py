"""Merges of many learners, each in a process of its own, whose peak is measured. Run by test_memory.py."""

from __future__ import annotations

from collections.abc import Callable

from deltapost.adapters import Backend, kernels
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.torch import TorchBackend
from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.diloco import DiLoCo, Median, Merge, TrimmedMean
from deltapost.serialization import ParameterSpec, Schema, TensorBytes
from hostile.measuring import Attack, run

#: Two blocks of the reduction tree.
ELEMENTS = 8_192
MANY, SOME = 10_000, 512


def closing(backend: Backend, merge: Merge, learners: int) -> Callable[[], Attack]:
    """A round of so many learners with F4 deltas of one tensor."""

    def prepare() -> Attack:
        spec = ParameterSpec("w", "F32", (ELEMENTS,))
        zero = TensorBytes("F32", spec.shape, bytes(4 * ELEMENTS))
        config = DiLoCo(sync_every=10, fragments=1, in_flight=1, delta_dtype="F4", merge=merge)
        aggregator = config.aggregator(Schema((spec,)), ["w"], backend)
        codes = [bytes((learner + i) % 256 for i in range(256)) * (ELEMENTS // 512) for learner in range(251)]
        scales = TensorBytes("F8_E8M0", (ELEMENTS // 32,), bytes([127]) * (ELEMENTS // 32))
        given = [
            Contribution(
                f"learner-{learner:05}",
                40,
                10,
                1_000,
                0.1,
                False,
                {"w": TensorBytes("F4", (ELEMENTS,), codes[learner % 251]), "w.scale": scales},
            )
            for learner in range(learners)
        ]
        state = FragmentState(0, {"w": zero}, {"momentum.w": zero})
        return lambda: aggregator.close_round(state, given)

    return prepare


IN_C = {
    "median in C": closing(NativeBackend(threads=1), Median(), MANY),
    "trimmed mean in C": closing(NativeBackend(threads=1), TrimmedMean(100), MANY),
}
REFERENCES = {
    "median in numpy": closing(NativeBackend(level="numpy"), Median(), SOME),
    "median in torch": closing(TorchBackend(), Median(), SOME),
}
#: Only where there is a build.
ATTACKS = {**(IN_C if kernels.available() else {}), **REFERENCES}

if __name__ == "__main__":
    run(ATTACKS)
