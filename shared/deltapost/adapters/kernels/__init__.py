"""Kernels: the C build of arithmetic version 1, where there is one for this machine.

`load()` finds it beside this file: the package's build compiles `close.c` and `encode.c` once for the
processor's baseline and, on x86-64, once more with AVX2. Where no compiler was there, or the machine is
big-endian, there is none, and numpy gives the same bytes. Calls release the GIL, so that threads of Python
share the work: each takes its own range of blocks.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from deltapost.errors import ConfigurationError

Level: TypeAlias = Literal["baseline", "avx2"]
#: From the fastest on.
LEVELS: Final[tuple[Level, ...]] = ("avx2", "baseline")
#: As `formats.h` numbers them.
FORMATS: Final = {"F32": 0, "F16": 1, "BF16": 2, "F8_E4M3": 3, "F4": 4}
#: As `formats.h` has it: the scale exponent of an F8 tensor whose codes are all zero.
NO_EXPONENT: Final = -(2**31)
#: The fewest blocks that are worth a thread: half a megabyte of float32.
BLOCKS_PER_THREAD: Final = 32

_int64, _pointer, _int32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32


class Deltas(ctypes.Structure):
    """`struct deltas` of `close.c`."""

    _fields_ = (
        ("pieces", _int64),
        ("learners", _int64),
        ("elements", _pointer),
        ("first_block", _pointer),
        ("data", _pointer),
        ("scales", _pointer),
        ("formats", _pointer),
    )


class Merging(ctypes.Structure):
    """`struct merging` of `close.c`."""

    _fields_ = (
        ("coefficients", _pointer),
        ("units", _pointer),
        ("trim", _int64),
        ("base", _pointer),
    )


class Stepping(ctypes.Structure):
    """`struct stepping` of `close.c`."""

    _fields_ = (
        ("factors", _pointer),
        ("has_factor", _pointer),
        ("learning_rate", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("is_final", _int32),
        ("commit", _int32),
        ("dtypes", _pointer),
        ("master", _pointer),
        ("master_formats", _pointer),
        ("old_anchor", _pointer),
        ("momentum_in", _pointer),
        ("master_out", _pointer),
        ("momentum_out", _pointer),
        ("anchor_out", _pointer),
        ("update_out", _pointer),
        ("update_scales", _pointer),
        ("exponents", _pointer),
        ("flags", _pointer),
        ("largest", _pointer),
    )


#: As `deltapost_sizes` packs them.
_SIZES: Final = ctypes.sizeof(Deltas) << 32 | ctypes.sizeof(Merging) << 16 | ctypes.sizeof(Stepping)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "squares": (None, (_pointer, _int64, _int64, _pointer, _int64)),
    "merge": (ctypes.c_int, (_pointer, _pointer, _int64, _int64, _pointer, _int64)),
    "add_blocks": (None, (_int64, _pointer, _int64, _pointer, _int64, _pointer)),
    "step": (None, (_pointer, _pointer, _int64, _int64)),
    "publish": (None, (_pointer, _pointer, _int64, _int64)),
    "dots": (None, (_pointer, _pointer, _int64, _int64, _int64, _pointer)),
    "decode": (None, (_int32, _pointer, _pointer, _int64, _int64, _int64, _pointer)),
    "largest": (ctypes.c_uint32, (_pointer, _pointer, _int64, _int64, _int64)),
    "encode": (
        ctypes.c_int,
        (_int32, _int32, _pointer, _pointer, _int64, _int64, _int64, _pointer, _pointer, _pointer),
    ),
}


class Kernels:
    """One loaded build: its functions by name, as `close.c` documents them."""

    def __init__(self, path: Path, level: Level) -> None:
        """Raises ConfigurationError for a build of another release's sources: its tables are others."""
        self.path = path
        self.level = level
        library = ctypes.CDLL(str(path))
        sizes = getattr(library, "deltapost_sizes", None)
        if sizes is not None:
            sizes.restype, sizes.argtypes = _int64, ()
        if sizes is None or sizes() != _SIZES:
            raise ConfigurationError(
                f"{path} was built from other sources than this release's",
                hint="install deltapost again; in a checkout: delete it, then pip install -e .",
            )
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"deltapost_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __repr__(self) -> str:
        return f"Kernels({self.level})"

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)


def available() -> dict[Level, Path]:
    """The builds that are there and that this processor can run."""
    found: dict[Level, Path] = {}
    if sys.byteorder != "little":
        return found
    for suffix in (".abi3.so", *EXTENSION_SUFFIXES):
        for level in LEVELS:
            path = Path(__file__).with_name(f"_{level}{suffix}")
            if level not in found and path.exists():
                found[level] = path
    if "avx2" in found and not _has_avx2(found.get("baseline")):
        del found["avx2"]
    return found


def _has_avx2(baseline: Path | None) -> bool:
    return baseline is not None and bool(ctypes.CDLL(str(baseline)).deltapost_has_avx2())


@cache
def load(level: Level | None = None) -> Kernels | None:
    """The build of that level, or the fastest; None where there is none."""
    builds = available()
    for wanted in LEVELS if level is None else (level,):
        if wanted in builds:
            return Kernels(builds[wanted], wanted)
    return None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="deltapost kernels")


os.register_at_fork(after_in_child=_pool.cache_clear)  # the parent's threads are not the child's


def threads_for(blocks: int, threads: int | None, *, least: int = BLOCKS_PER_THREAD) -> int:
    """How many of `threads` (None: one per processor) share so many blocks, each with `least` or more."""
    return max(1, min(threads or os.cpu_count() or 1, blocks // least))


def share(
    blocks: int,
    threads: int | None,
    work: Callable[[int, int, int], object],
    *,
    least: int = BLOCKS_PER_THREAD,
) -> None:
    """Runs work(part, begin, end) over all blocks, in parts of about equal size, each in a thread."""
    parts = threads_for(blocks, threads, least=least)
    if parts == 1:
        work(0, 0, blocks)
        return
    bounds = [part * blocks // parts for part in range(parts + 1)]
    running = [
        _pool(parts - 1).submit(work, part, bounds[part], bounds[part + 1]) for part in range(1, parts)
    ]
    try:
        work(0, 0, bounds[1])
    finally:
        for one in running:
            one.exception()
    for one in running:
        one.result()
