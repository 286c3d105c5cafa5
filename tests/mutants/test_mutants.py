"""The list of mutants cannot rot: each still fits its file, and each row of the promise table has some."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from mutants import ALL, ROWS_TO_COME
from mutants.mutant import ROOT, SIMULATOR, Mutant


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: f"{mutant.row}: {mutant.name}")
def test_a_mutant_fits_its_file_once_and_its_killer_exists(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()

    assert text.count(mutant.old) == 1
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))
    if mutant.killer != SIMULATOR:
        path, _, name = mutant.killer.partition("::")
        assert (ROOT / path).exists()
        assert not name or f"def {name}(" in (ROOT / path).read_text()


def test_every_row_of_the_promise_table_has_mutants() -> None:
    assert {mutant.row for mutant in ALL} == set(range(1, 24)) - ROWS_TO_COME


def test_no_two_mutants_have_one_name() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in ALL).items() if count > 1] == []
