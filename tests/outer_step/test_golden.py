"""Whole rounds have the SHA-256 they had when arithmetic version 1 was written down.

A difference means that anchors of existing runs could not be computed again: that is a new arithmetic
version. `UPDATE_GOLDEN=1 pytest tests/outer_step/test_golden.py` writes the file anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltapost.adapters import Backend
from deltapost.algorithms import ARITHMETIC_VERSION
from deltapost.algorithms.diloco import Median, Merge
from deltapost.serialization import digest, pack
from outer_step.tensors import BACKENDS, EXACT, RULES, SCHEMA, config, first_state, round_of

FILE = Path(__file__).with_name("golden.json")
DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F4")
CODEC_CASES = [(delta, commit) for delta in DTYPES for commit in (None, *DTYPES)]
#: RDA, the default, is in the cases above.
MERGE_CASES = [(rule, dtype) for rule in RULES[1:] for dtype in ("F32", "BF16", "F4")]


def digest_of(
    delta: str, commit: str | None, backend: str | Backend, merge: Merge = RULES[0], second: int = 3
) -> str:
    """The SHA-256 over two rounds' states, updates and observations; `second` learners are in the second."""
    aggregator = config(delta_dtype=delta, commit_dtype=commit, merge=merge).aggregator(
        SCHEMA, SCHEMA.names, BACKENDS[backend] if isinstance(backend, str) else backend
    )
    state, parts = first_state(), []
    for round_ in (round_of(delta), round_of(delta)[:second]):
        result = aggregator.close_round(state, round_)
        state = result.state
        seen = [
            (one.learner, one.weight.hex(), one.norm.hex(), one.cosine.hex()) for one in result.participants
        ]
        cosine = None if result.cosine is None else result.cosine.hex()
        parts += [pack(state.theta), pack(state.outer), repr((seen, cosine)).encode()]
        parts.append(b"" if result.update is None else pack(result.update))
    return digest(b"".join(parts)).hex()


def recorded(key: str, native: Callable[[], str]) -> str:
    """The digest that the file holds; with UPDATE_GOLDEN, the one that `native` finds, written there."""
    if os.environ.get("UPDATE_GOLDEN"):
        known = json.loads(FILE.read_text()) if FILE.exists() else {"arithmetic": ARITHMETIC_VERSION}
        known[key] = native()
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    golden = json.loads(FILE.read_text())
    assert golden["arithmetic"] == ARITHMETIC_VERSION
    return str(golden[key])


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize(("delta", "commit"), CODEC_CASES)
def test_a_round_has_its_recorded_digest(delta: str, commit: str | None, backend: str) -> None:
    expected = recorded(f"{delta}/{commit}", lambda: digest_of(delta, commit, "native"))

    assert digest_of(delta, commit, backend) == expected


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize(("merge", "dtype"), MERGE_CASES, ids=str)
def test_every_merge_has_its_recorded_digest(merge: Merge, dtype: str, backend: str) -> None:
    # The second round has an even number of participants: the median of two in the middle.
    expected = recorded(f"{merge} {dtype}", lambda: digest_of(dtype, dtype, "native", merge, second=4))

    assert digest_of(dtype, dtype, backend, merge, second=4) == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_digest_is_the_same_at_any_thread_count(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = digest_of("F4", "F4", "torch")
        medians = digest_of("F4", "F4", "torch", Median(), second=4)
    finally:
        torch.set_num_threads(before)

    golden = json.loads(FILE.read_text())
    assert found == golden["F4/F4"]
    assert medians == golden["Median() F4"]
