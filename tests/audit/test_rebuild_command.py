"""`deltapost ledger rebuild RUN`: says what it did, and in its exit status whether everything held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltapost.cli.main import app
from deltapost.errors import WrongRevision
from deltapost.ledger.engine import open_ledger
from deltapost.serialization.names import record_key
from deltapost.stores.directory import DirectoryStore
from fixtures.histories import FRAGMENTS, ROUNDS, ScriptedRun, history, restore
from fixtures.pipeline import RUN


def test_the_command_rebuilds_and_says_so(migrated_sqlite_url: str, tmp_path: Path) -> None:
    ledger = open_ledger(migrated_sqlite_url)
    scripted = ScriptedRun(ledger, store=DirectoryStore(tmp_path / "store"))
    scripted.play()
    before = history(ledger)
    restore(ledger, {})
    words = [
        "ledger",
        "rebuild",
        RUN,
        f"--store=file://{tmp_path / 'store'}",
        f"--ledger={migrated_sqlite_url}",
    ]

    whole = CliRunner().invoke(app, [*words, "--json"])
    repeated = CliRunner().invoke(app, words)
    scripted.pipeline.store.delete(record_key(RUN, 0, 2))
    broken = CliRunner().invoke(app, words)

    assert (whole.exit_code, repeated.exit_code, broken.exit_code) == (0, 0, 1)
    said = json.loads(whole.stdout)
    assert (said["added"], said["learners"], said["stopped"]) == (FRAGMENTS * ROUNDS, 4, None)
    assert [fragment["head"] for fragment in said["fragments"]] == [ROUNDS] * FRAGMENTS
    assert "0 rounds added, 0 completed" in repeated.stdout
    assert record_key(RUN, 0, 2) in broken.stderr
    assert history(ledger) == before
    ledger.close()


def test_a_database_without_tables_is_told_to_migrate_first(sqlite_url: str, tmp_path: Path) -> None:
    words = ["ledger", "rebuild", RUN, f"--store=file://{tmp_path}", f"--ledger={sqlite_url}"]

    with pytest.raises(WrongRevision, match="deltapost ledger migrate"):
        CliRunner().invoke(app, words, catch_exceptions=False)
