"""Rounds that are larger than the memory they may take, in processes of their own. Run by test_windows.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltapost import codecs
from deltapost.adapters import mapped
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.admission import check_payload, delta_norm
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.diloco import DiLoCo
from deltapost.serialization import ParameterSpec, Schema, TensorBytes, pack, packed, unpack
from deltapost.stores.directory import DirectoryStore
from deltapost_aggregator.objects import put_verified
from deltapost_aggregator.spool import Spool
from deltapost_aggregator.transfers import sha256_of
from hostile.measuring import Attack, run

#: Elements and learners of each size, and the delta formats that a process closes rounds of.
SIZES = {"small": (4_000_000, 16, ("F4", "F32")), "large": (25_000_000, 64, ("F4",))}


def closing(delta: str, elements: int, learners: int) -> Callable[[], Attack]:
    """Takes in a round's payloads, closes it, hashes, uploads and reads back what came of it."""

    def prepare() -> Attack:
        directory = Path(tempfile.mkdtemp())
        spool = Spool(directory)
        backend = NativeBackend(threads=2, buffers=spool.buffers)
        config = DiLoCo(sync_every=10, fragments=1, in_flight=1, delta_dtype=delta, commit_dtype="BF16")
        spec = ParameterSpec("w", "F32", (elements,))
        values = np.random.default_rng(0).standard_normal(elements, dtype=np.float32) * np.float32(0.01)
        tensor = TensorBytes("F32", spec.shape, values.tobytes())

        def spooled(data: bytes) -> memoryview:
            buffer = spool.take(len(data))
            buffer[:] = np.frombuffer(data, np.uint8)
            mapped.release(mapped.behind([buffer.ctypes.data]))
            return memoryview(buffer.data).toreadonly()

        codec = codecs.get(delta)
        payload = pack(codec.encode("w", NativeBackend().load(tensor)))
        payloads = [spooled(payload) for _ in range(learners)]
        state = genesis_state([spec], unpack(spooled(pack({"w": tensor}))))
        state = FragmentState(0, state.theta, unpack(spooled(pack(state.outer))))
        store = DirectoryStore(directory / "store")
        aggregator = config.aggregator(Schema((spec,)), ["w"], backend)

        def attack() -> None:
            contributions = []
            for number, data in enumerate(payloads):
                entries = check_payload(data, [spec], codec)
                assert delta_norm(entries, [spec], codec, backend) > 0
                contributions.append(
                    Contribution(f"learner-{number:03}", 40, 10, 1_000 + number, 0.1, False, entries)
                )
            result = aggregator.close_round(state, contributions)
            assert result.update is not None
            for tensors in (result.state.theta, result.state.outer, result.update):
                made = packed(tensors)
                put_verified(store, f"objects/{sha256_of(made).hex()}", made)

        return attack

    return prepare


if __name__ == "__main__":
    size, count, formats = SIZES[os.environ.get("DELTAPOST_TEST_SIZE", "small")]
    run({f"{count} of {delta}": closing(delta, size, count) for delta in formats})
