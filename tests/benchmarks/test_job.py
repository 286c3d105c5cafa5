"""What the benchmark of the whole job makes of what its learners say."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("job_rounds")


def test_a_round_goes_from_its_last_upload_until_the_last_learner_is_aligned(rounds: ModuleType) -> None:
    found = rounds.Rounds(2)

    said = [
        found.hear("ada", "uploaded", 1.0, 0, 0),
        found.hear("bob", "uploaded", 1.5, 0, 0),
        found.hear("ada", "aligned", 1.7, 0, 0),
        found.hear("bob", "aligned", 2.0, 0, 0),
    ]

    assert said == [False, False, False, True]
    assert found.seconds == [pytest.approx(0.5)]
    assert found.uploads == [2]


def test_an_upload_that_came_after_the_commit_is_not_of_the_round(rounds: ModuleType) -> None:
    found = rounds.Rounds(2)
    found.hear("ada", "uploaded", 1.0, 0, 0)
    found.hear("ada", "aligned", 1.2, 0, 0)
    found.hear("bob", "uploaded", 1.3, 0, 0)

    assert found.hear("bob", "aligned", 1.4, 0, 0)

    assert found.seconds == [pytest.approx(0.4)]
    assert found.uploads == [1]


def test_who_takes_over_a_newer_version_is_aligned_with_those_before(rounds: ModuleType) -> None:
    found = rounds.Rounds(2)
    for number in (0, 4):  # numbered over all fragments, as the peer does
        found.hear("ada", "uploaded", float(number), 0, number)
        found.hear("ada", "aligned", number + 0.5, 0, number)

    assert found.hear("bob", "aligned", 5.0, 0, 4)

    assert found.seconds == [pytest.approx(5.0), pytest.approx(1.0)]
