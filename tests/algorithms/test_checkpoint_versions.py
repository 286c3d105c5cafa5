"""Retention and checkpoints: whatever is kept can be computed from what is kept, for every K and policy."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost.algorithms.checkpoints import checkpoint_of, is_checkpoint
from deltapost.limits import MAX_CHECKPOINT_EVERY
from deltapost.serialization.retention import Released

DIGEST = hashlib.sha256(b"x").digest()


def needs(version: int, every: int) -> set[tuple[str, int]]:
    """Area and base of everything that the state at this version is computed from."""
    start = checkpoint_of(version, every)
    states = {(area, start - 1) for area in ("anchors", "outer")} if start else set()
    return states | {(area, base) for area in ("deltas", "updates") for base in range(start, version)}


@given(every=st.integers(1, MAX_CHECKPOINT_EVERY), head=st.integers(2, 2_000), kept=st.integers(1, 2_000))
@settings(deadline=None, max_examples=60)
def test_no_span_takes_what_the_head_or_a_kept_round_is_computed_from(
    every: int, head: int, kept: int
) -> None:
    # Given what a policy of `rounds=kept` lets go through, moved back to a checkpoint as `planned` does
    allowed = max(0, head - kept)
    through = checkpoint_of(allowed, every)
    if through == 0:
        return
    released = Released(
        run="r", manifest=DIGEST, fragment=0, through=through, record=DIGEST, policy=f"rounds={kept}"
    )

    # Then the state before each kept round, its own inputs and the head's state are all still there
    for version in {allowed, allowed + 1, (allowed + head) // 2, head - 1, head}:
        gone = {(area, base) for area, base in needs(version, every) if released.covers(area, base)}
        assert gone == set(), f"version {version} of {head}"
    # and the rounds up to the checkpoint are not kept for nothing
    assert released.covers("deltas", through - 1)
    assert not released.covers("anchors", through - 1)


@given(every=st.integers(1, MAX_CHECKPOINT_EVERY), version=st.integers(0, 10_000))
@settings(deadline=None)
def test_a_checkpoint_is_the_newest_at_or_below_a_version_and_less_than_k_behind(
    every: int, version: int
) -> None:
    start = checkpoint_of(version, every)

    assert is_checkpoint(start, every)
    assert start <= version < start + every
    assert not any(is_checkpoint(between, every) for between in range(start + 1, version + 1))
