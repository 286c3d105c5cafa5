"""Each build in C gives numpy's bytes: every code, odd size and thread count, whatever the numbers."""

from __future__ import annotations

import _ctypes
import shutil
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost.adapters import floats, kernels, microscaling, native_codes
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.reduction import BLOCK, tree_dot
from deltapost.errors import ConfigurationError, NonFinite
from deltapost.serialization import TensorBytes
from outer_step.tensors import ODD_SHAPES, rough

LEVELS = tuple(kernels.available())
NUMPY = NativeBackend(level="numpy")
#: float32 bits of every kind: zeros, subnormals, the ends of the formats, halves between codes, NaNs.
SPECIAL = (
    0x00000000,
    0x80000000,
    0x00000001,
    0x807FFFFF,
    0x00800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC00001,
    0x7F800001,
    0x3E800000,
    0x3F400000,
    0x3FA00000,
    0x3FE00000,
    0x40200000,
    0x40600000,
    0x40A00000,
    0x40E00000,
    0x33000000,
    0x33000001,
    0x387FE000,
    0x38800000,
    0x477FEFFF,
    0x477FF000,
    0x47800000,
    0x3C800000,
    0x3C7FFFFF,
    0x43700000,
    0x43780000,
)


def backend(level: str, threads: int | None = None) -> NativeBackend:
    return NativeBackend(threads=threads, level=level)  # type: ignore[arg-type]


def f32_of(bits: list[int]) -> TensorBytes:
    return TensorBytes("F32", (len(bits),), struct.pack(f"<{len(bits)}I", *bits))


def test_there_is_a_build_wherever_there_is_a_compiler() -> None:
    """`make venv` builds from source: without this, the tests below could pass over nothing."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]

    assert bool(LEVELS) == (shutil.which(compiler) is not None)
    assert (NativeBackend().kernels is not None) == bool(LEVELS)


def test_a_build_that_is_left_over_from_other_sources_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a checkout that was updated and not built again."""
    with pytest.raises(ConfigurationError, match=r"_ctypes.* was built from other sources"):
        kernels.Kernels(Path(_ctypes.__file__), "baseline")

    monkeypatch.setattr(kernels, "_SIZES", kernels._SIZES + 8)
    for level, path in kernels.available().items():
        with pytest.raises(ConfigurationError, match="was built from other sources"):
            kernels.Kernels(path, level)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(SPECIAL)), min_size=1, max_size=200))
def test_floats_of_any_bits_are_narrowed_and_quantized_as_numpy_does(level: str, bits: list[int]) -> None:
    given_ = f32_of(bits)
    ours, theirs = backend(level).load(given_), NUMPY.load(given_)

    for dtype in ("F32", "F16", "BF16"):
        assert ours.to_bytes(dtype) == theirs.to_bytes(dtype)
    for quantized in ("F8_E4M3", "F4"):
        try:
            expected = theirs.quantize(quantized)
        except NonFinite as error:
            with pytest.raises(NonFinite, match=str(error)[:20]):
                ours.quantize(quantized)
        else:
            assert ours.quantize(quantized) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("exponent", [-149, -127, -126, -20, 0, 3, 119, 120, 121, 127])
def test_quantizing_is_numpys_at_both_ends_of_the_exponents(level: str, exponent: int) -> None:
    grid = np.ldexp(np.linspace(-1, 1, 4097).astype(np.float32), exponent).astype(np.float32)
    value = TensorBytes("F32", grid.shape, grid.tobytes())

    for quantized in ("F8_E4M3", "F4"):
        assert backend(level).load(value).quantize(quantized) == NUMPY.load(value).quantize(quantized)


@pytest.mark.parametrize("level", LEVELS)
def test_every_code_of_every_format_has_numpys_value(level: str) -> None:
    for dtype in ("F16", "BF16"):
        every = TensorBytes(dtype, (65_536,), np.arange(65_536, dtype="<u2").tobytes())  # type: ignore[arg-type]
        decoded = np.empty(65_536, np.float32)
        codes = np.frombuffer(every.data, np.uint8)
        found = backend(level).kernels
        assert found is not None
        found.decode(kernels.FORMATS[dtype], codes.ctypes.data, None, 65_536, 0, 16, decoded.ctypes.data)
        expected, nan = floats.widen(every), np.isnan(floats.widen(every))
        assert (np.isnan(decoded) == nan).all()
        assert (decoded.view(np.uint32) == expected.view(np.uint32))[~nan].all()
    f8 = TensorBytes("F8_E4M3", (256,), bytes(range(256)))
    for scale in (2.0**-126, 0.25, 1.0, 2.0**120, 0.0, -1.0, 1.7, float("inf"), float("nan")):
        same_values(level, f8, TensorBytes("F32", (), struct.pack("<f", scale)), (256,))
    f4 = TensorBytes("F4", (512 * 16,), bytes(range(256)) * 16)
    for first in range(256):
        scales = bytes((first + i) % 256 for i in range(256))
        same_values(level, f4, TensorBytes("F8_E8M0", (256,), scales), (512 * 16,))


def same_values(level: str, data: TensorBytes, scale: TensorBytes, shape: tuple[int, ...]) -> None:
    ours = backend(level).dequantize(data, scale, shape).array
    theirs = microscaling.dequantize(data, scale, shape)
    nan = np.isnan(theirs)
    assert (np.isnan(ours) == nan).all()
    assert (ours.view(np.uint32) == theirs.view(np.uint32))[~nan].all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [*ODD_SHAPES, (70 * BLOCK + 5,)], ids=str)
def test_sums_are_the_tree_s_at_every_odd_size(level: str, shape: tuple[int, ...], threads: int) -> None:
    left, right = NUMPY.load(rough(shape, 1)).array, NUMPY.load(rough(shape, 2)).array
    found = backend(level).kernels
    assert found is not None

    assert native_codes.tree_dot(found, threads, left, right) == tree_dot(left, right)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
@pytest.mark.parametrize("size", [0, 1, 31, 33, BLOCK, 70 * BLOCK + 5])
def test_what_the_codes_leave_out_is_the_residual_to_the_bit(
    level: str, threads: int, dtype: str, size: int
) -> None:
    values, before = NUMPY.load(rough((size,), 3)), NUMPY.load(rough((size,), 4))
    wanted = values + before
    expected = wanted.quantize(dtype)  # type: ignore[arg-type]
    left_out = wanted - NUMPY.dequantize(*expected, (size,))
    residual = before.array.copy()
    found = backend(level).kernels
    assert found is not None

    codes = native_codes.quantize(found, threads, values.array, dtype, residual)  # type: ignore[arg-type]

    assert codes == expected
    assert residual.tobytes() == left_out.array.tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
def test_a_residual_is_left_as_it_was_when_a_value_is_not_finite(level: str, dtype: str) -> None:
    values, residual = np.zeros(BLOCK, np.float32), np.ones(BLOCK, np.float32)
    values[77] = np.inf
    found = backend(level).kernels
    assert found is not None

    with pytest.raises(NonFinite):
        native_codes.quantize(found, 1, values, dtype, residual)  # type: ignore[arg-type]

    assert (residual == 1).all()


def test_a_child_process_has_threads_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "forks.py"
    program.write_text(
        "import os, sys\n"
        "import numpy as np\n"
        "from deltapost.adapters.native import NativeBackend\n"
        "from deltapost.serialization import TensorBytes\n"
        f"data = TensorBytes('F32', ({70 * BLOCK},), np.ones({70 * BLOCK}, np.float32).tobytes())\n"
        "norm = NativeBackend(threads=2).load(data).squared_norm()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if NativeBackend(threads=2).load(data).squared_norm() == norm else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )

    assert subprocess.run([sys.executable, program], timeout=60, check=False).returncode == 0
