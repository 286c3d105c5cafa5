"""`deltapost doctor` names what closes rounds here, and says so when its bytes are not the right ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from deltapost.adapters import kernels
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import selfcheck
from deltapost.cli import doctor as command
from deltapost.cli.main import app


def doctor(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words])


def test_every_implementation_here_has_its_bytes() -> None:
    done = doctor("--json")

    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report["in_use"] == next(iter(kernels.available()), "numpy")
    assert set(report["backends"]) >= {
        "native (numpy)",
        "torch (cpu)",
        *(f"native ({level})" for level in kernels.available()),
    }
    assert all(not one["failed"] for one in report["backends"].values())
    assert {one["rounds"] for one in report["backends"].values()} == {len(selfcheck.DIGESTS)}


def test_a_round_with_other_bytes_is_named_and_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(selfcheck.DIGESTS))
    monkeypatch.setitem(selfcheck.DIGESTS, name, "00" * 32)
    monkeypatch.setattr(command, "_backends", lambda: {"native": NativeBackend()})

    done = doctor()

    assert done.exit_code == 1
    assert "DO NOT CLOSE ROUNDS HERE" in done.stdout
    assert f"{name}: expected {'00' * 32}" in done.stdout


def test_without_a_build_numpy_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", dict)
    monkeypatch.setattr(command, "_checked", lambda _backend: {"rounds": 0, "failed": []})

    done = doctor()

    assert done.exit_code == 0
    assert "rounds are closed by: numpy" in done.stdout
    assert "no build in C is here" in done.stdout
