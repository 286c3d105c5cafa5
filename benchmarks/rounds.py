"""The rounds that several benchmarks close, and how a worker gets the numbers of one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

GRADIENTMAIL = "gradientmail==0.0.2"
LARGE = {"elements": 4_194_304, "tensors": 6, "learners": 8}
SETTINGS = {"merge": "rda", "commit": "BF16"}


@contextmanager
def numbers(given: Mapping[str, Any], *, threads: int, scale: float = 1.0) -> Iterator[dict[str, Any]]:
    """What a worker is given of a round, with a directory that holds its numbers."""
    elements = max(1, round(scale * given["elements"]))
    with tempfile.TemporaryDirectory(prefix="deltapost-bench-") as directory:
        file = Path(directory) / "values.npy"
        values = np.random.default_rng(0).standard_normal((2, elements), dtype=np.float32)
        np.save(file, 0.01 * values)
        settings = SETTINGS | dict(given) | {"elements": elements, "threads": threads}
        yield settings | {"file": str(file), "directory": directory}
