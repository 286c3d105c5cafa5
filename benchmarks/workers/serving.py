"""What the workers share, in whatever Python each runs: the round's numbers, and the turns of closing it."""

import json
import sys
import time

import numpy as np

#: What the parent asks for: elements, tensors, learners, delta, commit, merge, threads and the numbers' file.
GIVEN = json.loads(sys.argv[1])
NAMES = [f"t{index:04}" for index in range(GIVEN["tensors"])]
ANCHOR, _NOISE = np.load(GIVEN["file"])


def delta(learner):
    """The float32 delta that a learner has of each tensor."""
    return np.roll(_NOISE, 7 * learner) * np.float32(0.5 + learner / 8)


def by_tensor(entries, copied):
    """{name: entry} of every tensor, from those of one that is called `x`; each with bytes of its own."""
    return {name + entry[1:]: copied(tensor) for name in NAMES for entry, tensor in entries.items()}


def serve(close):
    """Says `ready`, then closes once for each line and answers with the seconds it took."""
    print("ready", flush=True)
    for _line in sys.stdin:
        started = time.perf_counter()
        result = close()
        print(time.perf_counter() - started, flush=True)
        del result
