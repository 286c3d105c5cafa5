"""Closes the golden vectors with what this process can load, and says what differs: then the exit code is 1.

`python -m outer_step.close_vectors` takes numpy and each build in C, at one, two and three threads; `--help`
says what else there is.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deltapost.adapters import Backend, kernels
from deltapost.adapters.native import NativeBackend
from outer_step import vectors


def implementations(with_numpy: bool, with_torch: bool) -> Iterator[tuple[str, Backend]]:
    if with_numpy:
        yield f"numpy {np.__version__}", NativeBackend(level="numpy")
    for level in kernels.available():
        for threads in (1, 2, 3):
            yield f"C {level}, {threads} threads", NativeBackend(threads=threads, level=level)
    if with_torch:
        import torch

        from deltapost.adapters.torch import TorchBackend

        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            yield f"torch {torch.__version__}, {threads} threads", TorchBackend()


def main() -> int:
    parser = argparse.ArgumentParser(description="closes the golden vectors")
    parser.add_argument("--library", type=Path, help="the one build in C to use")
    parser.add_argument("--without-numpy", action="store_true", help="C alone")
    parser.add_argument("--torch", action="store_true", help="torch's CPU too")
    parser.add_argument("--every", type=int, default=1, help="only each K-th case")
    parser.add_argument("--wide", action="store_true", help="the large tensors too")
    options = parser.parse_args()
    if options.library is not None:
        library: Path = options.library.resolve()
        kernels.available = lambda: {"baseline": library}
    cases = vectors.CASES[:: options.every] + (vectors.WIDE_CASES if options.wide else ())
    failed = 0
    for name, backend in implementations(not options.without_numpy, options.torch):
        wrong = []
        for case in cases:
            with vectors.shared_by_threads(case):
                wrong += [f"{case.name}: {what}" for what in vectors.differing(case, backend)]
        failed += len(wrong)
        print(
            f"Python {platform.python_version()} {platform.machine()}, {name}: "
            f"{len(cases)} rounds, {len(wrong)} differences",
            *wrong[:8],
            sep="\n    ",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
