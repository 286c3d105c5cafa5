"""Five contributions in all 120 orders, in two processes with different hash seeds: one SHA-256."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

from deltapost.algorithms.diloco import Merge
from outer_step.tensors import EXACT, RULES

TESTS = Path(__file__).parents[1]


@cache
def digests_of_all_orders(backend: str, merge: Merge) -> set[str]:
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
    aggregator = config(commit_dtype="F4", merge=merge).aggregator(schema, schema.names, BACKENDS[backend])
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


@pytest.mark.parametrize("merge", RULES, ids=str)
def test_five_contributions_in_every_order_have_one_digest(merge: Merge) -> None:
    native, *others = (digests_of_all_orders(backend, merge) for backend in EXACT)

    assert len(native) == 1
    assert others == [native] * len(others)


def test_the_digest_is_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from outer_step.test_every_order import RULES, digests_of_all_orders\n"
        "for merge in (RULES[0], RULES[-1]):\n"
        "    print(*digests_of_all_orders('native', merge))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(TESTS)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    here = [digests_of_all_orders("native", merge) for merge in RULES]
    assert done.stdout.split() == [*here[0], *here[-1]]
    assert len(set().union(*here)) == len(RULES)
