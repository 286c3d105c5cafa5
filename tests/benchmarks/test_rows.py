"""The benchmarks of README's table run, however small, and leave what they say; the table is the records'."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = import_module("harness")
    monkeypatch.setattr(found, "OUTPUT", tmp_path / "bench")
    return found


def measured(harness: ModuleType, name: str, **arguments: Any) -> dict[str, Any]:
    """What a benchmark leaves in its file after the smallest run."""
    import_module(name).main(samples=2, threads=1, **arguments)
    found: dict[str, Any] = json.loads((harness.OUTPUT / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "scale", "peer"),
    [
        ("close", 1e-4, "gradientmail"),
        ("files", 1e-4, "gradientmail"),
        ("mean", 1e-4, "flower"),
        ("limit", 1e-4, None),
        ("encode", 1e-4, None),
    ],
)
def test_a_benchmark_leaves_samples_medians_ratios_and_targets(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, scale: float, peer: str | None
) -> None:
    # Given deltapost in the place of a peer, which would have to be downloaded
    module = import_module(name)

    def started(given: Mapping[str, Any], sides: Mapping[str, Any]) -> AbstractContextManager[Any]:
        own = next(iter(sides.values()))
        return harness.workers(given, {**sides, **({peer: own} if peer else {})})

    monkeypatch.setattr(module, "workers", started)
    if peer:
        monkeypatch.setattr(module, "python_of", lambda *_, **__: sys.executable)

    found = measured(harness, name, scale=scale)

    assert {"commit", "date", "machine", "command", "python", "threads"} <= found.keys()
    assert found["command"].startswith(f"make bench-{name}")
    for row in found["rows"].values():
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["seconds"].values())
        assert row["medians"] == {side: sum(samples) / 2 for side, samples in row["seconds"].items()}
        assert row["ratio"] > 0
    assert any({"at_least", "at_most"} & row.keys() for row in found["rows"].values())


def test_sides_take_turns_and_a_ratio_is_of_their_medians(harness: ModuleType) -> None:
    turns: list[str] = []
    clock = iter([1.0, 10.0, 3.0, 10.0, 2.0, 50.0])

    def side(name: str) -> Any:
        return lambda: (turns.append(name), next(clock))[1]

    seconds = harness.in_turns({"ours": side("ours"), "theirs": side("theirs")}, 3)
    row = harness.compared(seconds, harness.times("theirs", "ours"), at_least=5.0, aim=6.0)

    assert turns == ["ours", "theirs"] * 3
    assert row["medians"] == {"ours": 2.0, "theirs": 10.0}
    assert row["ratio"] == 5.0
    assert harness.reached(row)
    assert not harness.reached(row | {"at_least": 5.1})
    assert harness.wanted(row) == "≥ 5 (6)"


def test_a_limit_counts_each_byte_once(harness: ModuleType) -> None:
    bandwidth = import_module("bandwidth")
    # Given a triad that moves 12 bytes for each of a million elements in a millisecond: 12 GB/s
    limit = bandwidth.Limit(bandwidth.close_bytes(1_000_000, 8, "F4", "BF16"), 1_000_000)

    row = harness.over_limit({"close": [0.01], "triad": [0.001]}, limit, "close", at_most=5.0)

    # Then 8 payloads of 4.25 bits, three float32 in and out and a BF16 update are 30.25 bytes an element
    assert row["bytes"] == 30_250_000
    assert row["triad_gb_per_second"] == 12.0
    assert row["ratio"] == pytest.approx(0.01 / (30.25e6 / 12e9), abs=0.01)
    assert bandwidth.encode_bytes(32, "F8_E4M3") == 32 * 13


def test_a_side_that_breaks_down_ends_the_benchmark_with_its_name(harness: ModuleType) -> None:
    with (
        pytest.raises(SystemExit, match="close_deltapost did not start"),
        harness.workers({"tensors": 1}, {"deltapost": (sys.executable, "close_deltapost")}),
    ):
        pass


def test_the_table_in_the_readme_is_what_the_newest_records_say(harness: ModuleType) -> None:
    table = import_module("table")

    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert f"{table.BEGIN}\n{table.markdown()}\n{table.END}" in readme


def test_every_benchmark_has_its_target_and_stands_in_the_one_that_runs_all(harness: ModuleType) -> None:
    every = import_module("every")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for name in every.BENCHMARKS + every.LONG + every.CURVES:
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
        assert f"\nbench-{name}: $(DEV_STAMP) ## " in makefile
