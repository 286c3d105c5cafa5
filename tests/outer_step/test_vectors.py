"""Golden vectors hold: whatever the thread count, build, backend and Python, one SHA-256 for each case.

A difference means that rounds of existing runs could not be computed again: that is a new arithmetic version.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Sequence

import pytest
import torch

from deltapost.adapters import Backend, kernels
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.torch import TorchBackend
from outer_step import pythons, vectors
from outer_step.vectors import CASES, DELTAS, SMALL, WIDE_CASES, Case, contributions

if os.environ.get("UPDATE_GOLDEN"):
    vectors.write()

#: numpy, and each build with more or fewer threads; `slow` has the thread counts that are left out here.
NATIVE = {"numpy": NativeBackend(level="numpy")} | {
    f"{level}, {threads} threads": NativeBackend(threads=threads, level=level)
    for level, threads in zip(kernels.available(), (3, 2), strict=False)
}
REST = {
    f"{level}, {threads} threads": NativeBackend(threads=threads, level=level)
    for level in kernels.available()
    for threads in (1, 2, 3)
    if f"{level}, {threads} threads" not in NATIVE
}
#: Of 6 × 6 × 6 cases each thirteenth: every format, merge and commit is among them.
STEP = 13
SAMPLE = CASES[::STEP]
OTHERS = pythons.others()


def differences(cases: Sequence[Case], backend: Backend) -> dict[str, list[str]]:
    found = {}
    for case in cases:
        with vectors.shared_by_threads(case):
            if wrong := vectors.differing(case, backend):
                found[case.name] = wrong
    return found


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("name", NATIVE)
def test_every_merge_and_commit_of_a_delta_format_has_its_bytes(name: str, delta: str) -> None:
    assert not differences([case for case in CASES if case.delta == delta], NATIVE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_every_other_thread_count_gives_the_same(name: str) -> None:
    assert not differences(CASES, REST[name])


@pytest.mark.parametrize("name", [*NATIVE, *REST])
def test_large_tensors_are_shared_among_threads_and_have_their_bytes(name: str) -> None:
    assert not differences(WIDE_CASES, (NATIVE | REST)[name])


def test_torch_has_the_same_bytes_in_a_sample_of_all_formats_merges_and_commits() -> None:
    check_torch(SAMPLE, 1)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_torch_shares_large_tensors_among_threads_and_has_their_bytes(threads: int) -> None:
    check_torch(WIDE_CASES[threads - 1 : threads], threads)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_torch_has_the_same_bytes_in_every_case(threads: int, delta: str) -> None:
    check_torch([case for case in CASES if case.delta == delta], threads)


def check_torch(cases: Sequence[Case], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert not differences(cases, TorchBackend())
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow  # it installs numpy for each
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", OTHERS)
def test_every_other_python_of_this_machine_has_the_same_bytes(version: str) -> None:
    packages = pythons.packages(version)
    command = [OTHERS[version], "-m", "outer_step.close_vectors", "--every", str(STEP)]

    done = subprocess.run(
        command,
        env=pythons.environment(packages),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f" {len(SAMPLE)} rounds, 0 differences") == 1 + 3 * len(kernels.available())
    assert f"Python {version}." in done.stdout


def test_a_difference_is_found_and_named() -> None:
    # Given arithmetic that is off by one place in one operation
    class Other(NativeBackend):
        def load(self, tensor: object) -> object:  # type: ignore[override]
            return super().load(tensor) * (1 + 2.0**-23)  # type: ignore[arg-type]

    case = Case("F32", "rda", None)

    assert not vectors.differing(case, NativeBackend(level="numpy"))
    assert vectors.differing(case, Other(level="numpy")) == ["anchor", "outer", "record"]


def test_the_inputs_can_be_made_again_from_integers_alone() -> None:
    def scrambled(i: int, seed: int) -> int:
        h = (2654435761 * i + 2246822519 * seed) % 2**32
        h ^= h >> 15
        h = 739982445 * h % 2**32
        h ^= h >> 12
        h = 695872825 * h % 2**32
        return h ^ h >> 15

    def bits(h: int) -> int:
        kind, low = h >> 27 & 15, h >> 23 & 15
        exponent = 0 if kind == 1 else 104 + low
        return h & 2**31 | (0 if kind == 0 else exponent << 23 | h & 0x7FFFFF)

    made = [scrambled(i, 777) for i in range(4200)]

    assert vectors.scrambled(4200, 777).tolist() == made
    floats = vectors.floats("F32", (3, 1400), 777, 104)
    assert floats.data == struct.pack("<4200I", *map(bits, made))
    assert vectors.floats("BF16", (3, 1400), 777, 104).data == struct.pack(
        "<4200H", *(bits(h) >> 16 for h in made)
    )


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_float_inputs_hold_zeros_of_both_signs_and_subnormals(dtype: str) -> None:
    code = "I" if dtype == "F32" else "H"
    sign, mantissa = {"F32": (2**31, 23), "F16": (2**15, 10), "BF16": (2**15, 7)}[dtype]
    tensors = contributions(Case(dtype, "rda", None), 6)[0].tensors
    seen = {bits for one in tensors.values() for (bits,) in struct.iter_unpack(f"<{code}", one.data)}

    assert {0, sign} <= seen
    assert any(0 < bits & ~sign < 1 << mantissa for bits in seen)


def test_coded_inputs_hold_every_legal_code_negative_zeros_and_padding_that_is_not_zero() -> None:
    f8 = contributions(Case("F8_E4M3", "rda", None), 6)[0].tensors["e"]
    f4 = contributions(Case("F4", "rda", None), 6)[0].tensors

    assert set(f8.data) == set(range(256)) - {0x7F, 0xFF}
    assert {nibble for byte in f4["e"].data for nibble in (byte & 15, byte >> 4)} == set(range(16))
    assert any(f4["a.embed"].data[17:])
    assert {1, 105, 112} <= set(f4["e.scale"].data)


def test_the_cases_are_all_there_and_differ_in_all_that_their_settings_decide() -> None:
    golden = vectors.golden()

    assert [len({getattr(case, part) for case in SAMPLE}) for part in ("delta", "rule", "commit")] == [6] * 3
    assert set(golden) == {case.name for case in (*CASES, *WIDE_CASES)}
    assert len(CASES) == 6**3
    assert len({digests[3] for digests in golden.values()}) == len(golden)
    assert len({(anchor, outer) for anchor, outer, _, _ in golden.values()}) == len(golden)
    sizes = [spec.elements % 4096 for spec in SMALL]
    assert {0, 1, 4095} <= set(sizes)
    assert len({one.elements for one in SMALL}) == len(SMALL) - 1
