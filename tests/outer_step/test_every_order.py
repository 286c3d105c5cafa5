"""Five contributions in all 120 orders, in two processes with different hash seeds: one SHA-256."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

from outer_step.tensors import EXACT

TESTS = Path(__file__).parents[1]


def digests_of_all_orders(backend: str) -> set[str]:
    """The digests of anchor, outer state, update and observations over every order of one round."""
    from deltapost.algorithms import FragmentState
    from deltapost.serialization import digest, pack
    from outer_step.tensors import BACKENDS, config, contribution, f32, two_element_schema

    schema = two_element_schema(names=("embed", "w"))
    state = FragmentState(
        3,
        {name: f32(0.1, -0.7) for name in schema.names},
        {f"momentum.{name}": f32(0.013, 0.17) for name in schema.names},
    )
    aggregator = config(commit_dtype="F4").aggregator(schema, schema.names, BACKENDS[backend])
    given = [
        contribution(
            f"learner-{i}",
            {name: f32(0.1 * i + 0.01, 1 / (i + 3)) for name in schema.names},
            tokens=100 + 7 * i,
            steps=i + 1,
        )
        for i in range(5)
    ]
    found = set()
    for order in permutations(given):
        result = aggregator.close_round(state, order)
        parts = [pack(result.state.theta), pack(result.state.outer), pack(result.update or {})]
        seen = [(one.learner, one.weight, one.norm, one.cosine) for one in result.participants]
        found.add(digest(b"".join(parts) + repr((seen, result.cosine)).encode()).hex())
    return found


def test_five_contributions_in_every_order_have_one_digest_in_every_process() -> None:
    here = {backend: digests_of_all_orders(backend) for backend in EXACT}
    code = (
        "from outer_step.test_every_order import EXACT, digests_of_all_orders\n"
        "print(*(digest for backend in EXACT for digest in digests_of_all_orders(backend)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(TESTS)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert len(here["native"]) == 1
    assert here["torch"] == here["native"]
    assert set(done.stdout.split()) == here["native"]
