"""`pip install` into an empty environment is enough to migrate a ledger and to run both services."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltapost.adapters import kernels
from fixtures.ports import free_ports

ROOT = Path(__file__).parents[2]

#: What a build reads; a copy of it leaves no build folders in the repository.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "shared", "services", "migrations")

#: Seconds until a service answers, on a busy machine with cold files.
START_SECONDS = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build reads, and nothing that one left behind."""
    source = tmp_path_factory.mktemp("source")
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=leave)
        else:
            shutil.copy(path, source / name)
    return source


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The bin directory of an environment that holds only the built wheel and what it requires."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=60)
    binaries = folder / "venv" / "bin"
    pip = [
        binaries / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--no-compile",
    ]
    done = subprocess.run(
        [*pip, "-c", ROOT / "constraints.txt", source], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return binaries


@contextlib.contextmanager
def running(command: list[str | Path], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=log.parent)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def ready(port: int, log: Path) -> dict[str, Any]:
    """What /readyz answers once it answers 200; fails with the last reason and the log."""
    reason = "no answer"
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except urllib.error.HTTPError as refused:
            reason = refused.read().decode()
            refused.close()
        except OSError as error:
            reason = str(error)
        time.sleep(0.2)
    raise AssertionError(f"not ready after {START_SECONDS} s: {reason}\n{log.read_text()}")


def doctor(python: Path, **environment: str) -> dict[str, Any]:
    """What `deltapost doctor` says of an installation."""
    program = "from deltapost.cli.main import main; main()"
    done = subprocess.run(
        [python, "-c", program, "doctor", "--json"],
        env={"PATH": os.defpath, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.timeout(400)
def test_with_and_without_a_compiler_an_installation_gives_the_same_bytes(
    installed: Path, source: Path, tmp_path: Path
) -> None:
    # Given an installation from source with a compiler, and one where every compilation fails
    build = [installed / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    left_by_the_first = shutil.ignore_patterns("build", "*.egg-info", "*.so")
    again = shutil.copytree(source, tmp_path / "source", ignore=left_by_the_first)
    done = subprocess.run(
        [*build, "--no-deps", "--target", tmp_path / "without", again],
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr

    with_compiler = doctor(installed / "python")
    without = doctor(installed / "python", PYTHONPATH=str(tmp_path / "without"))

    # Then the one computes in C (if there is a compiler here), the other with numpy: both pass the same check
    built = bool(kernels.available())
    assert (with_compiler["in_use"] != "numpy") == built
    assert all(path.startswith(str(installed.parent)) for path in with_compiler["builds"].values())
    assert (without["in_use"], without["builds"]) == ("numpy", {})
    assert not list((tmp_path / "without").rglob("*.so"))


@pytest.mark.timeout(400)
def test_an_empty_environment_with_the_wheel_migrates_and_starts_both_services(
    installed: Path, valkey_url: str, tmp_path: Path
) -> None:
    # Given no torch, no test tools and no source tree, only what the wheel requires
    def deltapost(*words: str) -> list[str | Path]:
        return [installed / "deltapost", *words]

    ledger_port, aggregator_port = free_ports(2)
    environment = {
        "PATH": os.defpath,
        "HOME": str(tmp_path),
        "DELTAPOST_REDIS_URL": valkey_url,
        "DELTAPOST_LEDGER_URL": f"sqlite:///{tmp_path}/ledger.db",
        "DELTAPOST_STORE": f"file://{tmp_path}/store",
        "DELTAPOST_SIGNING_KEY_FILE": str(tmp_path / "aggregator.key"),
        "DELTAPOST_LEDGER_PORT": str(ledger_port),
        "DELTAPOST_AGGREGATOR_HEALTH_PORT": str(aggregator_port),
    }
    (tmp_path / "store").mkdir()

    # When the key is made and the ledger migrated
    for words in (["keys", "generate", str(tmp_path / "aggregator.key")], ["ledger", "migrate"]):
        done = subprocess.run(
            deltapost(*words), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

    # Then both services start and say that they are ready
    aggregator_log, ledger_log = tmp_path / "aggregator.log", tmp_path / "ledger.log"
    with (
        running(deltapost("aggregator"), environment, aggregator_log),
        running(deltapost("ledger", "serve"), environment, ledger_log),
    ):
        assert ready(aggregator_port, aggregator_log)["ready"] is True
        assert ready(ledger_port, ledger_log)["ready"] is True
