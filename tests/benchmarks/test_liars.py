"""The liars' benchmark lies as it says, judges as the aggregator does; its page shows its newest record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from deltapost.algorithms.diloco import Median, WeightedMean
from deltapost.cli.demo.model import ModelSize

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the benchmark's processes do
    yield import_module("liars_rounds")
    torch.set_num_threads(threads)


def test_every_liar_sends_what_its_name_says(rounds: ModuleType) -> None:
    chance = np.random.default_rng(1)
    honest = [{"w": chance.standard_normal((30, 40), np.float32) + 0.5} for _ in range(6)]
    mean = {"w": np.mean([one["w"] for one in honest], axis=0)}
    median_norm = float(np.median([rounds.norm_of(one) for one in honest]))

    lies = {name: attack(honest, chance) for name, attack in rounds.ATTACKS.items()}

    assert {len(sent) for sent in lies.values()} == {2}
    assert rounds.norm_of(lies["scaled"][0].delta) == pytest.approx(1e6 * rounds.norm_of(mean), rel=1e-4)
    for name in ("flipped", "random", "boasting"):
        assert rounds.norm_of(lies[name][1].delta) == pytest.approx(median_norm, rel=1e-4)
    assert np.vdot(lies["flipped"][0].delta["w"], mean["w"]) < 0
    assert not np.array_equal(lies["random"][0].delta["w"], lies["random"][1].delta["w"])
    # Colluding: within the honest values' spread, and no longer than an admitted delta.
    colluding = lies["colluding"][0].delta
    assert colluding["w"].mean() == pytest.approx(
        0.5 - 1.5 * np.std([one["w"] for one in honest], axis=0).mean(), 0.1
    )
    assert rounds.norm_of(colluding) < 2 * median_norm
    assert [lie.tokens_factor for lie in lies["boasting"]] == [10**6] * 2


@pytest.mark.timeout(400)  # some ten seconds of CPU, on a busy machine
def test_admission_refuses_the_lies_that_its_limits_name_and_no_honest_delta(rounds: ModuleType) -> None:
    # Given a tiny task of one round
    task = rounds.Task(rounds=1, steps=2, size=ModelSize(layers=1, width=8, heads=1, context=8))
    bench = rounds.Bench(task)

    def run(merge: object, attack: str | None, limits: bool = True) -> object:
        return bench.run(task.algorithm(merge, limits=limits), rounds.ATTACKS.get(attack))

    alone = run(WeightedMean(), None)
    scaled, boasting = run(WeightedMean(), "scaled"), run(WeightedMean(), "boasting")
    unlimited = run(WeightedMean(), "boasting", limits=False)
    flipped = run(Median(), "flipped")

    # Then refused lies leave the very loss of the honest learners alone
    assert alone.verdicts == {"accepted": 6}
    assert scaled.verdicts == boasting.verdicts == {"accepted": 6, "outlier": 2}
    assert scaled.loss == boasting.loss == alone.loss
    # And what is admitted has its effect
    assert unlimited.verdicts == flipped.verdicts == {"accepted": 8}
    assert unlimited.loss > alone.loss
    assert 0 < alone.largest_norm < task.max_delta_norm


def test_the_page_on_liars_shows_the_newest_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    liars = import_module("liars")
    newest = max(liars.RECORDS.glob("*-liars.json"))
    record = json.loads(newest.read_text())

    page = (ROOT / "docs" / "liars.md").read_text()

    assert liars.markdown(record["cells"]) in page
    assert f"benchmarks/records/{newest.name}" in page
    assert {"commit", "date", "machine", "command"} <= record.keys()
