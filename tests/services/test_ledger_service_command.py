"""`deltapost ledger` migrates, tells, serves and takes down, with one line and status 1 when it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from deltapost.cli.ledger import app
from deltapost.errors import ConfigurationError, WrongRevision
from deltapost.ledger import revisions
from deltapost_ledger import LedgerSettings
from fixtures.ports import free_ports

COMMAND = [sys.executable, "-W", "error", "-m", "deltapost.cli.main", "ledger"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DELTAPOST_"):
            monkeypatch.delenv(name)


def deltapost_ledger(*arguments: str) -> Result:
    """Runs `deltapost ledger …` in this process."""
    return CliRunner().invoke(app, list(arguments))


def test_serve_refuses_a_wrong_revision_and_serves_once_migrated(sqlite_url: str, tmp_path: Path) -> None:
    # Given a database without schema: the command ends before it listens
    port = free_ports(1)[0]
    settings = {"DELTAPOST_LEDGER_URL": sqlite_url, "DELTAPOST_LEDGER_PORT": str(port)}
    serve = {"args": [*COMMAND, "serve"], "cwd": tmp_path, "env": os.environ | settings, "text": True}
    refused = subprocess.run(**serve, capture_output=True, timeout=100)
    assert refused.returncode == 1
    assert refused.stderr.strip().endswith("(run `deltapost ledger migrate`)")
    assert "Traceback" not in refused.stderr

    # When it is migrated
    assert deltapost_ledger("migrate", "--ledger", sqlite_url).exit_code == 0

    # Then it serves until it is told to stop
    serving = subprocess.Popen(**serve, stderr=subprocess.PIPE)
    try:
        ready = _wait_for(f"http://127.0.0.1:{port}/readyz", serving)
    finally:
        serving.send_signal(signal.SIGTERM)
        told = serving.communicate(timeout=30)[1]
    assert ready.json()["ready"] is True, told
    assert serving.returncode in (0, -signal.SIGTERM), told
    assert "Traceback" not in told


def _wait_for(url: str, process: subprocess.Popen[str]) -> httpx.Response:
    deadline = time.monotonic() + 60
    while True:
        try:
            return httpx.get(url)
        except httpx.TransportError:
            assert process.poll() is None, "the service ended"
            assert time.monotonic() < deadline, "the service does not answer"
            time.sleep(0.05)


def test_status_and_downgrade_tell_where_the_ledger_is(ledger_url: str) -> None:
    before = deltapost_ledger("status", "--ledger", ledger_url)
    up = deltapost_ledger("migrate", "--ledger", ledger_url)
    after = deltapost_ledger("status", "--ledger", ledger_url)
    asked = deltapost_ledger("downgrade", "base", "--ledger", ledger_url)
    kept = deltapost_ledger("status", "--ledger", ledger_url)
    down = deltapost_ledger("downgrade", "base", "--yes", "--ledger", ledger_url)

    assert isinstance(before.exception, WrongRevision)
    assert [result.exit_code for result in (up, after, asked, kept, down)] == [0, 0, 1, 0, 0]
    assert f"is at revision {revisions.head()}" in up.stdout
    assert f"is at revision {revisions.head()}" in after.stdout
    assert "is at revision base" in down.stdout


def test_without_a_url_the_setting_is_named() -> None:
    assert "DELTAPOST_LEDGER_URL" in str(deltapost_ledger("migrate").exception)


def test_every_help_has_an_example() -> None:
    for command in ("migrate", "downgrade", "status", "serve"):
        assert f"Example: deltapost ledger {command}" in deltapost_ledger(command, "--help").stdout


def test_flags_win_over_environment_and_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a file, and an environment that differs in two settings
    file = tmp_path / "deltapost.toml"
    file.write_text('ledger_url = "sqlite:///file.db"\nledger_host = "file"\nledger_port = 1\n')
    monkeypatch.setenv("DELTAPOST_CONFIG", str(file))
    monkeypatch.setenv("DELTAPOST_LEDGER_HOST", "environment")
    monkeypatch.setenv("DELTAPOST_LEDGER_PORT", "2")

    settings = LedgerSettings.read(ledger_port=3, ledger_url=None)

    assert settings.ledger_url.get_secret_value() == "sqlite:///file.db"
    assert (settings.ledger_host, settings.ledger_port) == ("environment", 3)


def test_settings_show_no_password_and_name_what_is_wrong() -> None:
    settings = LedgerSettings.read(ledger_url="postgresql://user:sesame@host/ledger")

    assert "sesame" not in f"{settings!r} {settings}"
    with pytest.raises(ValidationError):
        settings.ledger_port = 1
    with pytest.raises(ConfigurationError, match="ledger_port"):
        LedgerSettings.read(ledger_url="sqlite:///x.db", ledger_port=70_000)
