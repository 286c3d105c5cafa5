"""Self-check: whole rounds whose SHA-256 is known, closed here by whatever backend is asked.

Inputs come from a formula in integers, so that they are the same everywhere. The digests are arithmetic
version 1's: they cover anchors, outer state, updates and observations, for every delta and commit format and
every merge rule.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

from deltapost import codecs
from deltapost.adapters import Backend
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.diloco import DiLoCo
from deltapost.algorithms.rounds import Contribution, RoundResult
from deltapost.algorithms.rules import Median, Merge, NormClipped, Rda, TrimmedMean, WeightedMean
from deltapost.serialization.payload import pack
from deltapost.serialization.schema import ParameterSpec, Schema
from deltapost.serialization.tensor import ParameterDType, TensorBytes

#: More than two blocks of the reduction tree, a tail, a scalar and nothing; all three dtypes.
_PARAMETERS: Final[tuple[tuple[str, ParameterDType, tuple[int, ...]], ...]] = (
    ("a.embed", "BF16", (33,)),
    ("b", "F32", (3, 4099)),
    ("c", "F16", (4096,)),
    ("d", "F32", ()),
    ("e", "F32", (0, 3)),
)
_LEARNERS: Final = 4
_FORMATS: Final = ("F32", "F16", "BF16", "F8_E4M3", "F4")
_RULES: Final[tuple[Merge, ...]] = (
    Rda(),
    WeightedMean(),
    NormClipped(),
    NormClipped(Rda()),
    TrimmedMean(1),
    Median(),
)


@dataclass(frozen=True)
class Check:
    """One round's result: its name, and the SHA-256 that was expected and found (hex)."""

    name: str
    expected: str
    found: str

    @property
    def passed(self) -> bool:
        """Whether the bytes are those of arithmetic version 1."""
        return self.expected == self.found


def self_check(backend: Backend) -> Iterator[Check]:
    """Closes every round and compares; yields as it goes. Takes a second or two."""
    for name, delta, commit, merge in _cases():
        yield Check(name, DIGESTS[name], _digest(_round(backend, delta, commit, merge)))


def _cases() -> Iterator[tuple[str, str, str | None, Merge]]:
    for delta in _FORMATS:
        for commit in (None, *_FORMATS):
            yield f"{delta} deltas, {commit or 'no'} commits", delta, commit, Rda()
    for merge in _RULES[1:]:
        yield f"{merge}", "F4", "F4", merge


def _numbers(elements: int, seed: int) -> array[float]:
    """Multiples of 2⁻¹⁴ over five magnitudes, signs mixed, some zeros: all exact in F32."""
    return array(
        "f",
        (
            ((i * 7_919 + seed * 104_729) % 2_003 - 1_001) * 2.0**-14 * 4.0 ** ((i * 31 + seed) % 5)
            for i in range(elements)
        ),
    )


@cache
def _tensor(shape: tuple[int, ...], seed: int) -> TensorBytes:
    return TensorBytes("F32", shape, _numbers(prod(shape), seed).tobytes())


def _round(backend: Backend, delta: str, commit: str | None, merge: Merge) -> list[RoundResult]:
    specs = [ParameterSpec(name, dtype, shape) for name, dtype, shape in _PARAMETERS]
    config = DiLoCo.decoupled(fragments=1, in_flight=1, delta_dtype=delta, commit_dtype=commit, merge=merge)
    aggregator = config.aggregator(Schema(tuple(specs)), [spec.name for spec in specs], backend)
    theta = {
        spec.name: backend.load(_tensor(spec.shape, 11 * index)).to_bytes(spec.dtype)
        for index, spec in enumerate(specs)
    }
    codec, state, results = codecs.get(delta), genesis_state(specs, theta), []
    for version, learners in enumerate((_LEARNERS, _LEARNERS - 1)):
        contributions = []
        for learner in range(learners):
            tensors: dict[str, TensorBytes] = {}
            for index, spec in enumerate(specs):
                value = backend.load(_tensor(spec.shape, 100 * version + 10 * learner + index)) * 0.01
                tensors |= codec.encode(spec.name, value)
            contributions.append(
                Contribution(
                    f"learner-{learner}", 50, 10 + learner, 1_000 + 77 * learner, 0.1, False, tensors
                )
            )
        results.append(aggregator.close_round(state, contributions))
        state = results[-1].state
    return results


def _digest(results: list[RoundResult]) -> str:
    sha256 = hashlib.sha256()
    for result in results:
        sha256.update(pack(result.state.theta) + pack(result.state.outer) + pack(result.update or {}))
        seen = [
            (one.learner, one.weight.hex(), one.norm.hex(), one.cosine.hex()) for one in result.participants
        ]
        sha256.update(repr((seen, None if result.cosine is None else result.cosine.hex())).encode())
    return sha256.hexdigest()


#: Written once, with numpy alone; a difference is another arithmetic version.
DIGESTS: Final[dict[str, str]] = {
    "F32 deltas, no commits": "218b56136e12c8ea7ff8f80d61b7005ec8bf61161e687aab964cd47175cbdace",
    "F32 deltas, F32 commits": "0e7899fc0e37de3a13653e55d434a306b20f641c2d1a27445d77a5f056367a00",
    "F32 deltas, F16 commits": "4c9da0e98ddf4d88e1452428bdba8b930fd63dcd2a4a8e12cbedbf6639207f85",
    "F32 deltas, BF16 commits": "8e1bcb436d6b19a840e329bab7d93a12bf21fbb9d110011f66678c7f417954cd",
    "F32 deltas, F8_E4M3 commits": "5999ed81b7ea43731d84149096c4f95d1f2f654df1088d4e8eb3b676e7e88c5f",
    "F32 deltas, F4 commits": "7b503b39957f8b2b9f4deddbd5cb896a2dc6404d61cbd6a5e0b08da107115f27",
    "F16 deltas, no commits": "5b2c2dae4127ed8400d2e85cd7a04adf2285861b7c540fb48bb12c46c3acb204",
    "F16 deltas, F32 commits": "85ae2cb3154fc50c829773a3307fb152f424771f4f1a6e7cc2506553df33ed85",
    "F16 deltas, F16 commits": "9bbae29c7389cdf9625472de84f1ebc7395d7fc9f9467a06def0aec3dc740142",
    "F16 deltas, BF16 commits": "0a7a959fb0ee7a012daee134123e32c3aeb35eab5fe43443e951d5be2c7a1e7d",
    "F16 deltas, F8_E4M3 commits": "7bda42d2c7583b2538842ee9f17d9e190dd63d7a49b225fa0c407d2d18c226c7",
    "F16 deltas, F4 commits": "bb256841879f637c9bb9eece4aff55c9164d84e2358d37bdad0c20a49a94584d",
    "BF16 deltas, no commits": "d0f7adfb27ed78ebcedb325db5dc25b88fdc49f2c1d1b63aecea02b552269bb4",
    "BF16 deltas, F32 commits": "118bc2ba6ac454486acd4010b74320d1bb20f275ee9b00e7a4c02a7056957181",
    "BF16 deltas, F16 commits": "306c458cf97f04c1633ad1ff58f7425cbaedcb98630ecbf8b6c0857140ab793e",
    "BF16 deltas, BF16 commits": "7448984400e272a17c46b76f9f5f0766e1a2fb37b0d2b147cb33c39a55ded46f",
    "BF16 deltas, F8_E4M3 commits": "36761e0e539154169104c8e993a00f2f6c948bce7c0c02c5432255ee3ea2bb84",
    "BF16 deltas, F4 commits": "062195e9407bd02340dd8656b8dd1645e936263b1cb1e0d16cb31a7e4fcfa85e",
    "F8_E4M3 deltas, no commits": "96f8d4c9d6957a50acf2b0e48cad6a70242c315d2e83158de4d971a498e4f0c7",
    "F8_E4M3 deltas, F32 commits": "8e99380ff4157441aa16a811d24d1d2e4c46e0f05710f0d9c40ab4fa9a07fd2f",
    "F8_E4M3 deltas, F16 commits": "b1d844dfd47d35eb684bf4a47e106033a6ae7f35aa4ddeba3f2ea275a3d806a9",
    "F8_E4M3 deltas, BF16 commits": "713478fbed657582e4f01082117eca66c95e73c21908ceaf90b788813c65deee",
    "F8_E4M3 deltas, F8_E4M3 commits": "3f40ff50b865b84fb6514356138ed24a149269570b0f5b3dc8f5243c983cbc8a",
    "F8_E4M3 deltas, F4 commits": "4a32c4f877cfa6d5fb8c67e12553458dcde781d6ec5cf196206cc712b63d9120",
    "F4 deltas, no commits": "a0971db5cb2d0fcd226b3a2fb458209d94886eeb68e7f2ab2d73785c891feac3",
    "F4 deltas, F32 commits": "778e90da8273ca8b2da594a0d49b37538b07392186f39fd3dac2ec3d716bb6a9",
    "F4 deltas, F16 commits": "b7a4229d169d3242c67a845ea6d8b698645433454375bb775f395a066534243e",
    "F4 deltas, BF16 commits": "ddc2fe31d03a57747ac733c235ec8dccb8774037895a3ab7e1e9ed4af2fb855d",
    "F4 deltas, F8_E4M3 commits": "c96ff1cc5d74768736eaca087787a379d5e5107bf82e205e082bcf9a08e69313",
    "F4 deltas, F4 commits": "e0152310515e507c732cc88a7e810ee524621c87ea39f58889f930792bd24e2f",
    "WeightedMean()": "dee0c4b0a768ef4715f3cd94bb2c48a22d57a066398d721b4ed3aa729910e8d0",
    "NormClipped(base=WeightedMean())": "1a8cf725bc055017d0b83869c4cc22dae894e315731ca2e3319712f6b5e7bbf9",
    "NormClipped(base=Rda())": "858a8ede9be05c12f4bc7b13564aa6adb72dd600c707f388ef892faf95da94e1",
    "TrimmedMean(trim=1)": "5128457c46f1a3ea0c690c88cce3179236c5e3e5639daf23d0d2c5015e7f8f24",
    "Median()": "5128457c46f1a3ea0c690c88cce3179236c5e3e5639daf23d0d2c5015e7f8f24",
}
