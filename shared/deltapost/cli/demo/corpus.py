"""The demo's text: the Python standard library's own source, the same bytes for every process of a machine.

Whole files go either to the held-out part or to exactly one learner's shard, so nothing is trained on twice
and nothing held out is ever seen. A batch is a function of (shard, seed, step): a learner that was killed
goes on with the sample it would have drawn next.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltapost.errors import ConfigurationError

__all__ = ["Corpus", "held_out_batches", "load_corpus", "training_batch", "unigram_loss"]

#: Bytes of source text that are read: the whole library is about 11 MB, and a demo sees a few of them.
MAX_CORPUS_BYTES: Final = 16 * 1024 * 1024

#: Bytes of one file that are read, so that a single generated table is no large part of a shard.
MAX_FILE_BYTES: Final = 256 * 1024

#: Every so many-th file is held out.
HELD_OUT_EVERY: Final = 20

#: Directories that are not hand-written library source: third-party code, tests and generated tables.
_LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True)
class Corpus:
    """Source text in bytes: what is held out, and one disjoint shard for each learner."""

    held_out: bytes
    shards: tuple[bytes, ...]


def load_corpus(learners: int, *, root: Path | None = None) -> Corpus:
    """Reads the library's `*.py` below `root` (default: this Python's own) and deals the files out by name.

    Raises ConfigurationError when there are too few files for `learners` shards.
    """
    if learners < 1:
        raise ConfigurationError(f"a corpus is for at least 1 learner, not {learners}")
    source = Path(sysconfig.get_path("stdlib")) if root is None else root
    held_out: list[bytes] = []
    shards: list[list[bytes]] = [[] for _ in range(learners)]
    for index, text in enumerate(_texts(source)):
        if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
            held_out.append(text)
        else:
            # The lightest shard takes the file: shards stay about equal however large single files are.
            min(shards, key=lambda shard: sum(map(len, shard))).append(text)
    if not held_out or not all(shards):
        raise ConfigurationError(
            f"{source} has too little Python source for {learners} learners and a held-out part",
            hint="run the demo with a Python that has its standard library as source files",
        )
    return Corpus(b"".join(held_out), tuple(b"".join(shard) for shard in shards))


def training_batch(shard: bytes, *, seed: int, step: int, batch_size: int, context: int) -> NDArray[np.int64]:
    """The windows that `step` trains on: shape (batch_size, context + 1), inputs and the byte after each."""
    text = np.frombuffer(shard, dtype=np.uint8)
    if len(text) <= context:
        raise ConfigurationError(f"a shard of {len(text)} bytes holds no window of {context} + 1 bytes")
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(text) - context, size=batch_size)
    windows: NDArray[np.int64] = text[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows


def held_out_batches(
    text: bytes, *, windows: int, batch_size: int, context: int
) -> Iterator[NDArray[np.int64]]:
    """The same `windows` of (context + 1) bytes every time, spread evenly over `text`, in batches."""
    data = np.frombuffer(text, dtype=np.uint8)
    if len(data) <= context:
        raise ConfigurationError(
            f"a held-out text of {len(data)} bytes holds no window of {context} + 1 bytes"
        )
    starts = np.linspace(0, len(data) - context - 1, num=windows).astype(np.int64)
    for first in range(0, windows, batch_size):
        chosen = starts[first : first + batch_size]
        yield data[chosen[:, None] + np.arange(context + 1)].astype(np.int64)


def unigram_loss(training: Sequence[bytes], held_out: bytes) -> float:
    """Nats per byte of `held_out` under the byte frequencies of `training`, add-one smoothed.

    >>> round(unigram_loss([b"a" * 1000 + b"b" * 1000], b"ab"), 1)
    0.8
    """
    counts = np.ones(256, dtype=np.int64)
    for text in training:
        counts += np.bincount(np.frombuffer(text, dtype=np.uint8), minlength=256)
    seen = np.bincount(np.frombuffer(held_out, dtype=np.uint8), minlength=256)
    total = math.log(int(counts.sum()))
    nats = math.fsum(
        int(often) * (total - math.log(int(count))) for often, count in zip(seen, counts, strict=True)
    )
    return nats / len(held_out)


def _texts(root: Path) -> Iterator[bytes]:
    """The files' texts in the order of their relative names, until the corpus is full."""
    files = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    left = MAX_CORPUS_BYTES
    for name in sorted((path for path in files if not _LEFT_OUT & set(path.parts)), key=Path.as_posix):
        with (root / name).open("rb") as file:
            text = file.read(min(MAX_FILE_BYTES, left))
        left -= len(text)
        if left <= 0:
            return
        if text:
            yield text
