"""However many learners and parameters, a round takes the memory of a window, and gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.rounds_in_windows import SIZES
from deltapost import codecs
from deltapost.adapters import mapped
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Contribution, FragmentState, RoundResult
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.diloco import DiLoCo, Merge, Rda, TrimmedMean
from deltapost.limits import WINDOW_BYTES
from deltapost.serialization import ParameterSpec, Schema, TensorBytes, pack, unpack
from deltapost_aggregator.spool import Spool
from hostile.measuring import MIB, peaks

PROGRAM = Path(__file__).with_name("rounds_in_windows.py")


def test_a_round_takes_less_memory_than_its_payloads_have() -> None:
    """16 learners of 4M parameters: 34 MB of F4 payloads or 256 MB of F32 ones, and 80 MB of state twice."""
    for taken in peaks(PROGRAM).values():
        assert taken <= WINDOW_BYTES / MIB + 32


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_64_learners_of_25m_parameters_take_less_than_100_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    """850 MB of payloads and 250 MB of state, of which nothing is counted as given."""
    monkeypatch.setenv("DELTAPOST_TEST_SIZE", "large")
    (taken,) = peaks(PROGRAM, timeout=870).values()
    assert SIZES["large"][:2] == (25_000_000, 64)
    assert taken <= 100e6 / MIB


@pytest.mark.parametrize("commit", [None, "F8_E4M3", "F4"])
@pytest.mark.parametrize("merge", [Rda(), TrimmedMean(1)], ids=["rda", "trimmed"])
def test_windows_lead_to_the_bytes_of_a_round_in_memory(
    tmp_path: Path, commit: str | None, merge: Merge
) -> None:
    # Given a round of tensors with odd sizes, some below a block, in memory and in a spool
    specs = [ParameterSpec(f"t{index}", "F32", (size,)) for index, size in enumerate((700_001, 3, 123_457))]
    config = DiLoCo(
        sync_every=10, fragments=1, in_flight=1, delta_dtype="F8_E4M3", commit_dtype=commit, merge=merge
    )
    spool = Spool(tmp_path)
    plain = NativeBackend(threads=2)
    windowed = replace(plain, buffers=spool.buffers, window_bytes=1)

    def spooled(data: bytes) -> memoryview:
        array = mapped.allocate(tmp_path, len(data))
        array[:] = np.frombuffer(data, np.uint8)
        return memoryview(array.data).toreadonly()

    def close(backend: NativeBackend, put: Callable[[bytes], bytes | memoryview]) -> RoundResult:
        generator = np.random.default_rng(7)
        deltas = []
        for _ in range(5):
            entries = {}
            for spec in specs:
                values = generator.standard_normal(spec.shape, dtype=np.float32)
                value = plain.load(TensorBytes("F32", spec.shape, values.tobytes()))
                entries |= codecs.get("F8_E4M3").encode(spec.name, value)
            deltas.append(unpack(put(pack(entries))))
        anchor = {spec.name: TensorBytes("F32", spec.shape, bytes(4 * spec.elements)) for spec in specs}
        state = genesis_state(specs, unpack(put(pack(anchor))))
        state = FragmentState(0, state.theta, unpack(put(pack(state.outer))))
        given = [
            Contribution(f"learner-{number}", 40, 10, 1_000 + number, 0.1, False, tensors)
            for number, tensors in enumerate(deltas)
        ]
        aggregator = config.aggregator(Schema(tuple(specs)), [spec.name for spec in specs], backend)
        first = aggregator.close_round(state, given).state
        return aggregator.close_round(first, given)

    # When it is closed in one go and block by block
    whole, parts = close(plain, bytes), close(windowed, spooled)

    # Then nothing differs
    assert pack(whole.state.theta) == pack(parts.state.theta)
    assert pack(whole.state.outer) == pack(parts.state.outer)
    assert (whole.update is None) == (parts.update is None)
    assert pack(whole.update or {}) == pack(parts.update or {})
    assert (whole.cosine, whole.participants) == (parts.cosine, parts.participants)
