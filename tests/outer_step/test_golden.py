"""Whole rounds have the SHA-256 they had when arithmetic version 1 was written down.

A difference means that anchors of existing runs could not be computed again: that is a new arithmetic
version. `UPDATE_GOLDEN=1 pytest tests/outer_step/test_golden.py` writes the file anew.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from deltapost.algorithms import ARITHMETIC_VERSION
from deltapost.serialization import digest, pack
from outer_step.tensors import BACKENDS, EXACT, SCHEMA, config, first_state, round_of

FILE = Path(__file__).with_name("golden.json")
DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F4")
CASES = [(delta, commit) for delta in DTYPES for commit in (None, *DTYPES)]


def digest_of(delta: str, commit: str | None, backend: str) -> str:
    """The SHA-256 over two rounds' states, updates and observations."""
    aggregator = config(delta_dtype=delta, commit_dtype=commit).aggregator(
        SCHEMA, SCHEMA.names, BACKENDS[backend]
    )
    state, parts = first_state(), []
    for round_ in (round_of(delta), round_of(delta)[:3]):
        result = aggregator.close_round(state, round_)
        state = result.state
        seen = [
            (one.learner, one.weight.hex(), one.norm.hex(), one.cosine.hex()) for one in result.participants
        ]
        cosine = None if result.cosine is None else result.cosine.hex()
        parts += [pack(state.theta), pack(state.outer), repr((seen, cosine)).encode()]
        parts.append(b"" if result.update is None else pack(result.update))
    return digest(b"".join(parts)).hex()


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize(("delta", "commit"), CASES)
def test_a_round_has_its_recorded_digest(delta: str, commit: str | None, backend: str) -> None:
    key = f"{delta}/{commit}"
    if os.environ.get("UPDATE_GOLDEN"):
        known = json.loads(FILE.read_text()) if FILE.exists() else {"arithmetic": ARITHMETIC_VERSION}
        known[key] = digest_of(delta, commit, "native")
        FILE.write_text(json.dumps(known, indent=1) + "\n")

    golden = json.loads(FILE.read_text())

    assert golden["arithmetic"] == ARITHMETIC_VERSION
    assert digest_of(delta, commit, backend) == golden[key]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_digest_is_the_same_at_any_thread_count(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = digest_of("F4", "F4", "torch")
    finally:
        torch.set_num_threads(before)

    assert found == json.loads(FILE.read_text())["F4/F4"]
