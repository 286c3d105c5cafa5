"""Peak memory of each attack, measured in a process of its own, stays below what honest input may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltapost.limits import MAX_DOCUMENT_BYTES
from hostile.measuring import MIB, peaks

HERE = Path(__file__).parent

#: MiB that an attack may take at its peak.
BOUND = 64.0

#: Documents are read whole: the most that one of 8 MiB may take. The largest record there can be takes 120.
DOCUMENT_BOUND = 24 * MAX_DOCUMENT_BYTES / MIB
DOCUMENTS = {"record_of_nested_texts", "the_largest_record"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["attacks_on_reading.py", "attacks_on_services.py"])
def test_no_attack_takes_more_memory_than_it_may(program: str) -> None:
    measured = peaks(HERE / program)

    assert len(measured) >= 13
    over = {
        name: grown
        for name, grown in measured.items()
        if grown > (DOCUMENT_BOUND if name in DOCUMENTS else BOUND)
    }
    assert over == {}
