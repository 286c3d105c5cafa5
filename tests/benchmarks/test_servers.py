"""The benchmarks that start servers measure real rounds of real aggregators; curves are drawn."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = import_module("harness")
    monkeypatch.setattr(found, "OUTPUT", tmp_path / "bench")
    return found


@pytest.mark.slow
def test_an_announcement_is_held_against_every_part_of_its_round(harness: ModuleType) -> None:
    import_module("announcement").main(samples=2, threads=2, scale=1e-3)

    whole, bare = json.loads((harness.OUTPUT / "announcement.json").read_text())["rows"].values()
    parts = whole["parts"]
    assert parts.keys() == {"download", "hash", "close", "upload", "read back"}
    for index, total in enumerate(whole["seconds"]["sum of parts"]):
        assert total == pytest.approx(sum(found[index] for found in parts.values()), abs=0.001)
    assert whole["medians"]["sum of parts"] > bare["medians"]["without reading back"]
    assert whole["medians"]["announcement"] > 0


@pytest.mark.slow
def test_a_long_run_is_held_against_one_fragment_times_its_fragments(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    billion = import_module("billion")
    monkeypatch.setattr(billion, "FRAGMENTS", 3)

    billion.main(threads=2, scale=1e-4)

    (row,) = json.loads((harness.OUTPUT / "billion.json").read_text())["rows"].values()
    predicted = sum(3 * sum(parts.values()) for parts in row["parts_of_one_fragment"])
    assert row["seconds"]["predicted"][0] == pytest.approx(predicted, abs=0.02)
    assert row["seconds"]["two rounds"][0] == pytest.approx(sum(row["rounds"]), abs=0.02)
    assert len(row["rounds"]) == 2


def test_a_run_that_the_disk_has_no_room_for_is_not_begun(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    billion = import_module("billion")
    monkeypatch.setattr(billion, "DISK_BYTES", 10**12)

    with pytest.raises(SystemExit, match="GB free"):
        billion.main()


@pytest.mark.timeout(300)
def test_a_curve_has_a_point_for_each_round_and_is_drawn(harness: ModuleType) -> None:
    curves = import_module("curves")
    side = {"deltapost": (sys.executable, "close_deltapost")}
    base = {"tensors": 1, "learners": 2, "delta": "F4", "threads": 1}
    rounds = [base | {"elements": count} for count in (100_000, 2_000_000)]

    lines = curves.points(rounds, side, samples=1, scale=1.0)
    path = harness.OUTPUT / "curve-elements.png"
    curves.draw(path, "two rounds", "elements", [1, 20], lines, "seconds a close")

    # Then the round of twenty times the elements took the longer, and more memory: 24 bytes each are state
    small, large = lines["deltapost"]["megabytes"]
    assert large - small > 24 * 1_900_000 / 1e6
    assert len(lines["deltapost"]["seconds"]) == 2
    assert path.read_bytes().startswith(b"\x89PNG")
