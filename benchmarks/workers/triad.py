"""STREAM's triad over arrays far larger than the caches: in C where a compiler is, else in numpy."""

import ctypes
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from serving import GIVEN, serve

ELEMENTS = GIVEN["triad_elements"]
THREADS = GIVEN["threads"]
BOUNDS = [part * ELEMENTS // THREADS for part in range(THREADS + 1)]
SOURCE = Path(__file__).parents[1] / "triad.c"

pool = ThreadPoolExecutor(THREADS)
a, b, c = (np.full(ELEMENTS, value, np.float32) for value in (0.0, 1.0, 2.0))


def compiled():
    """The C function, built into the worker's directory; None without a compiler."""
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) or shutil.which("cc")
    if compiler is None:
        return None
    library = Path(GIVEN["directory"]) / "triad.so"
    command = [compiler, "-std=c11", "-O3", "-fPIC", "-shared", "-o", library, SOURCE]
    if subprocess.run(command, check=False).returncode:
        return None
    function = ctypes.CDLL(str(library)).deltapost_triad
    function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_float, *[ctypes.c_int64] * 2]
    function.restype = None
    return function


in_c = compiled()


def part(begin, end):
    if in_c is not None:
        in_c(a.ctypes.data, b.ctypes.data, c.ctypes.data, 3.0, begin, end)
        return
    np.multiply(c[begin:end], np.float32(3.0), out=a[begin:end])
    np.add(a[begin:end], b[begin:end], out=a[begin:end])


def triad():
    list(pool.map(part, BOUNDS[:-1], BOUNDS[1:]))


triad()  # the pages are there, the pool has its threads
serve(triad, how=lambda: "C" if in_c is not None else "numpy")
