"""Every command explains itself: help with an example, and errors in one line that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from deltapost.cli.main import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by its words."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def run(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltapost.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **(environment or {})},
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_of_itself(words: tuple[str, ...]) -> None:
    text = f"{COMMANDS[words].help} {COMMANDS[words].epilog}"

    assert "Example: " in text
    assert f"deltapost {' '.join(words)}" in text
    for parameter in COMMANDS[words].params:
        assert getattr(parameter, "help", None), f"{' '.join(words)} {parameter.name} has no help"


def test_there_are_the_commands_that_the_readme_and_compose_name() -> None:
    assert {
        ("aggregator",),
        ("demo",),
        ("keys", "generate"),
        ("ledger", "migrate"),
        ("ledger", "serve"),
    } <= set(COMMANDS)


def test_a_missing_setting_is_one_line_that_names_it() -> None:
    done = run("aggregator")

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("deltapost: setting 'redis_url'")
    assert "DELTAPOST_REDIS_URL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_aggregator_refuses_a_ledger_that_is_not_migrated_and_says_the_command(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert run("keys", "generate", str(key)).returncode == 0

    done = run(
        "aggregator",
        "--redis-url=redis://127.0.0.1:1",
        f"--store=file://{tmp_path / 'store'}",
        f"--ledger=sqlite:///{tmp_path / 'ledger.db'}",
        f"--signing-key-file={key}",
    )

    assert done.returncode == 1
    assert "deltapost ledger migrate" in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_are_made_once_for_their_owner_alone_and_shown_by_their_public_half(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "key"

    made = run("keys", "generate", str(path), "--json")
    again = run("keys", "generate", str(path))
    kept = run("keys", "generate", str(path), "--if-missing", "--json")
    shown = run("keys", "show", str(path))

    assert path.stat().st_mode & 0o777 == 0o600
    public = json.loads(made.stdout)["public_key"]
    assert json.loads(kept.stdout)["public_key"] == public
    assert public in shown.stdout
    assert path.read_text().strip() not in made.stdout + kept.stdout + shown.stdout
    assert again.returncode == 1
    assert "--if-missing" in again.stderr


@pytest.mark.parametrize("content", ["", "zz", "ab" * 31, "ab" * 33, "\u00e9" * 64])
def test_a_file_that_is_no_key_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)

    done = run("keys", "show", str(path))

    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "deltapost keys generate" in done.stderr
    assert "Traceback" not in done.stderr
