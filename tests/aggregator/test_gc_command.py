"""`deltapost gc RUN`: says what goes and what a day costs, and lets rounds go with the run's key only."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from deltapost.audit.history import BucketHistory, objects_of
from deltapost.cli.main import app
from deltapost.errors import ConfigurationError
from deltapost.ledger.engine import open_ledger
from deltapost.serialization.names import anchor_key
from deltapost.stores import open_store
from deltapost.stores.directory import DirectoryStore
from deltapost_aggregator.storage_report import collect
from fixtures.pipeline import AGGREGATOR_KEY, RUN, Pipeline, arrays, learner_signing_key, plain_config
from fixtures.s3 import S3Server
from fixtures.served import eventually

ROUNDS = 4


class Setup:
    """A run of four rounds, each with one refused payload, in a directory; and the command upon it."""

    def __init__(self, directory: Path, ledger_url: str) -> None:
        self.directory = directory
        self.ledger = open_ledger(ledger_url)
        self.pipeline = Pipeline(
            self.ledger,
            config=plain_config(quorum_size=1),
            learners=("ada",),
            store=DirectoryStore(directory / "store"),
        )
        worker = self.pipeline.worker()
        for version in range(ROUNDS):
            self.pipeline.post("ada", arrays(50 + version), version=version, steps=0)
            self.pipeline.post("ada", arrays(version), version=version)
            self.pipeline.run_to(version + 1, worker)
        AGGREGATOR_KEY.save(directory / "run.key")
        self.words = ["gc", RUN, f"--store=file://{directory / 'store'}", f"--ledger={ledger_url}"]

    def keys(self) -> set[str]:
        return {info.key for info in self.pipeline.store.list("")}

    def gc(self, *words: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*self.words, "--json", *words], catch_exceptions=False)
        assert done.exit_code == 0
        said: dict[str, Any] = json.loads(done.stdout)
        return said


@pytest.fixture
def setup(tmp_path: Path, migrated_sqlite_url: str) -> Iterator[Setup]:
    built = Setup(tmp_path, migrated_sqlite_url)
    yield built
    built.ledger.close()


def test_a_plan_says_what_would_go_and_what_a_day_costs_and_deletes_nothing(setup: Setup) -> None:
    before = setup.keys()

    everything = setup.gc("--plan")
    retained = setup.gc("--plan", "--retain=rounds=1")
    shown = CliRunner().invoke(app, [*setup.words, "--plan", "--retain=days=1"], catch_exceptions=False)

    assert setup.keys() == before
    size = everything["areas"]["deltas"]["unnamed"]["bytes"]
    assert everything["gone"] == {"objects": ROUNDS, "bytes": size}
    assert size > 0
    assert everything["retain"] == "all"
    released = {area: found.get("released", {}).get("objects") for area, found in retained["areas"].items()}
    assert (released["deltas"], released["anchors"], released["outer"]) == (3, 2, 2)
    assert retained["released_through"] == {"0": 3}
    forecast = everything["forecast"]
    assert forecast["rounds_per_day"] > 0
    # One learner, no updates: delta, anchor, outer, record, attestation; read back, and followed by one.
    assert forecast["puts_per_day"] == pytest.approx(5 * forecast["rounds_per_day"])
    assert forecast["gets_per_day"] == pytest.approx(6 * forecast["rounds_per_day"])
    assert forecast["settles_at_bytes"] is None
    assert retained["forecast"]["settles_at_bytes"] > 0
    assert "deltas" in shown.stdout
    assert "GB" in shown.stdout


def test_it_collects_what_the_plan_said_and_a_second_time_nothing(setup: Setup) -> None:
    strange = f"{RUN}/deltas/readme"
    setup.pipeline.store.put(strange, b"whose?")
    planned = setup.gc("--plan")

    done, again = setup.gc(), setup.gc()

    assert done["gone"] == planned["gone"]
    assert again["gone"] == {"objects": 0, "bytes": 0}
    assert done["foreign"] == {"objects": 1, "keys": [strange]}
    named = set().union(*(objects_of(setup.pipeline.record(v)) for v in range(1, ROUNDS + 1)))
    assert named | {strange} <= setup.keys()


def test_letting_go_needs_the_runs_key_and_leaves_its_note(setup: Setup, tmp_path: Path) -> None:
    learner_signing_key("mallory").save(tmp_path / "other.key")
    before = setup.keys()
    for words in ([], [f"--signing-key-file={tmp_path / 'other.key'}"]):
        with pytest.raises(ConfigurationError, match="aggregator key"):
            setup.gc("--retain=rounds=2", *words)
    assert setup.keys() == before

    done = setup.gc("--retain=rounds=2", f"--signing-key-file={tmp_path / 'run.key'}")

    assert done["released_through"] == {"0": 2}
    note = BucketHistory.open(setup.pipeline.store, RUN).released(0)
    assert note is not None
    assert (note.through, note.policy) == (2, "rounds=2")
    record = setup.pipeline.record(1)
    left = setup.keys()
    assert anchor_key(RUN, 0, 0, record.anchor.sha256) not in left
    # A later call without a policy goes on from the note.
    assert setup.gc()["released_through"] == {"0": 2}


def test_killed_uploads_are_listed_and_aborted_once_they_are_old_and_live_ones_never(
    migrated_sqlite_url: str, seaweed_s3: S3Server
) -> None:
    # Given an upload of a killed process, and one that still goes on, on a real server
    prefix = f"tests/{secrets.token_hex(8)}"
    store = open_store(f"s3://{seaweed_s3.bucket}/{prefix}", **seaweed_s3.options)
    ledger = open_ledger(migrated_sqlite_url)
    Pipeline(ledger, store=store)
    history = BucketHistory.open(store, RUN)
    client = seaweed_s3.client()
    killed, live = (
        {"Bucket": seaweed_s3.bucket, "Key": f"{prefix}/{anchor_key(RUN, 0, 0, bytes([number] * 32))}"}
        for number in range(2)
    )
    for target in (killed, live):
        target["UploadId"] = client.create_multipart_upload(**target)["UploadId"]
    part = {"PartNumber": 1, "Body": bytes(5 * 1024 * 1024)}
    client.upload_part(**killed, **part)

    def uploads(*, plan: bool) -> list[str | None]:
        report = collect(
            ledger, history, plan=plan, retain=None, key=None, idle_seconds=3.0, poll_seconds=1.0
        )
        return [upload.key for upload in report.uploads]

    eventually(lambda: len(uploads(plan=True)) == 2)
    client.upload_part(**live, **part)

    # When garbage is collected
    aborted = uploads(plan=False)

    # Then only the one in which nothing happens is aborted, and the other completes
    assert aborted == [killed["Key"].removeprefix(f"{prefix}/")]
    sums = [{"PartNumber": p["PartNumber"], "ETag": p["ETag"]} for p in client.list_parts(**live)["Parts"]]
    client.complete_multipart_upload(**live, MultipartUpload={"Parts": sums})
    with pytest.raises(ClientError, match="NoSuchUpload"):
        client.list_parts(**killed)
    ledger.close()
