"""A round's numbers, the same in whatever Python it is closed."""

import numpy as np
from serving import GIVEN

#: Given: elements, tensors, learners, delta, commit, merge, threads and the numbers' file.
NAMES = [f"t{index:04}" for index in range(GIVEN["tensors"])]
ANCHOR, _NOISE = np.load(GIVEN["file"])


def delta(learner):
    """The float32 delta that a learner has of each tensor."""
    return np.roll(_NOISE, 7 * learner) * np.float32(0.5 + learner / 8)


def by_tensor(entries, copied):
    """{name: entry} of every tensor, from those of one that is called `x`; each with bytes of its own."""
    return {name + entry[1:]: copied(tensor) for name in NAMES for entry, tensor in entries.items()}
