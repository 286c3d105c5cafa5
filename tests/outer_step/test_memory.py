"""Merging many learners takes memory for a block at a time, or for one tensor of each, not for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.measuring import MIB, peaks
from outer_step.merges_of_many import ATTACKS, ELEMENTS, IN_C, MANY, REFERENCES, SOME

#: MiB that the deltas of the one tensor have as float32.
AS_FLOAT32 = SOME * ELEMENTS * 4 / MIB
#: The keys of 32 columns, and the lists and addresses of so many contributions: 1.2 KiB for each.
OF_MANY = (32 * 4 + 1_200) * MANY / MIB + 8


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    return peaks(Path(__file__).with_name("merges_of_many.py"))


@pytest.mark.parametrize("name", [name for name in ATTACKS if name in IN_C])
def test_order_statistics_of_ten_thousand_learners_keep_no_block_of_each(
    measured: dict[str, float], name: str
) -> None:
    assert OF_MANY < MANY * 4_096 * 4 / MIB / 5
    assert measured[name] <= OF_MANY


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_holds_the_deltas_of_one_tensor_a_few_times(
    measured: dict[str, float], name: str
) -> None:
    assert AS_FLOAT32 <= measured[name] <= 4 * AS_FLOAT32
