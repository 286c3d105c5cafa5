"""The reduction tree: sums of float32 products with the same bits in every framework and thread count.

Elements are cut into blocks of 4096, the last padded with +0. Products are float32. In a block,
t[i] ← t[i] + t[i + h] for h = 2048, 1024 … 1, in float32; the blocks' results are added in index order in
float64, starting from +0. Every step is an elementwise operation, so nothing depends on how a library
orders a sum.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from deltapost.adapters.floats import Floats

#: Elements of a block. Part of arithmetic version 1.
BLOCK: Final = 4096
#: Blocks reduced at a time: 1 MiB of products stays in a core's cache. Has no influence on any bit.
_BLOCKS_AT_ONCE: Final = 64
#: From this width on the tree goes on across blocks: rows of few elements are slow to loop over.
NARROW: Final = 32


def tree_dot(left: Floats, right: Floats) -> float:
    """Σ left·right by the tree, for contiguous float32 arrays of equal size."""
    return add_blocks(_block_sums(left.reshape(-1), right.reshape(-1)))


def add_blocks(sums: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    """The blocks' results, added one after the other in float64."""
    if sums.size == 0:
        return 0.0
    # add.accumulate is a running sum by definition; add.reduce would add pairwise.
    with np.errstate(all="ignore"):
        return 0.0 + float(np.add.accumulate(sums, dtype=np.float64)[-1])


def _block_sums(left: Floats, right: Floats) -> Floats:
    blocks = -(-left.size // BLOCK)
    sums = np.empty(blocks, np.float32)
    step = _BLOCKS_AT_ONCE * BLOCK
    with np.errstate(all="ignore"):
        for start in range(0, left.size, step):
            products = left[start : start + step] * right[start : start + step]
            if products.size % BLOCK:
                whole = np.zeros(-(-products.size // BLOCK) * BLOCK, np.float32)
                whole[: products.size] = products
                products = whole
            first = start // BLOCK
            sums[first : first + products.size // BLOCK] = _halve(products.reshape(-1, BLOCK))
    return sums


def _halve(tree: Floats) -> Floats:
    width = BLOCK // 2
    while width > NARROW:
        tree[:, :width] += tree[:, width : 2 * width]
        width //= 2
    columns = np.ascontiguousarray(tree[:, : 2 * width].T)
    while width:
        columns[:width] += columns[width : 2 * width]
        width //= 2
    sums: Floats = columns[0]
    return sums
