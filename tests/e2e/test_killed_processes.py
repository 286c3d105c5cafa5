"""A real aggregator, killed with SIGKILL at a step and started again, leaves the undisturbed records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.points import ROUND_POINTS
from deltapost.serialization.messages import CommitMessage, read_message
from deltapost.serialization.names import commits_stream
from deltapost.stores.directory import DirectoryStore
from deltapost.streams import START
from deltapost.streams.redis import RedisLog
from fixtures.pipeline import AGGREGATOR_KEY, LEARNERS, RUN, Pipeline, arrays, plain_config

ROUNDS = 2
SAMPLED = ("intake.tx_sent", "seal.tx_done", "record.put_sent", "round.tx_done")


def points() -> list[ParameterSet]:
    return [
        pytest.param(point, id=point, marks=[] if point in SAMPLED else [pytest.mark.slow])
        for point in ROUND_POINTS
    ]


def post_round(pipeline: Pipeline, version: int) -> None:
    for number, learner in enumerate(LEARNERS):
        signed = pipeline.post(learner, arrays(10 * version + number), version=version)
        if number == 0:
            pipeline.append(signed)
            pipeline.post(learner, arrays(500 + version), version=version)


def eventually(there: Callable[[], bool], what: str, *, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def announced(pipeline: Pipeline) -> set[int]:
    """The versions whose commits were announced."""
    entries = pipeline.log.read(commits_stream(RUN), START, limit=1000)
    messages = [read_message(entry.data or b"").message for entry in entries]
    return {message.version for message in messages if isinstance(message, CommitMessage)}


def aggregator(environment: dict[str, str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "deltapost.cli.main", "aggregator"],
            env={**os.environ, **environment, **more},
            stdout=file,
            stderr=file,
        )


def undisturbed(directory: Path) -> tuple[list[bytes], object]:
    ledger = open_ledger(f"sqlite:///{directory / 'undisturbed.db'}")
    migrate(ledger)
    pipeline = Pipeline(ledger, config=plain_config(delta_dtype="F4", commit_dtype="F4"))
    worker = pipeline.worker()
    for version in range(ROUNDS):
        post_round(pipeline, version)
        pipeline.run_to(version + 1, worker)
    found = pipeline.records(), pipeline.dump()
    ledger.close()
    return found


@pytest.mark.parametrize("point", points())
def test_sigkill_at_a_step_of_a_real_process_changes_no_record(
    ledger: Ledger, migrated_url: str, valkey_url: str, tmp_path: Path, point: str
) -> None:
    AGGREGATOR_KEY.save(tmp_path / "aggregator.key")
    store = DirectoryStore(tmp_path / "store")
    log = RedisLog(valkey_url)
    pipeline = Pipeline(
        ledger, config=plain_config(delta_dtype="F4", commit_dtype="F4"), store=store, log=log
    )
    output = tmp_path / "aggregator.log"
    environment = {
        "DELTAPOST_REDIS_URL": valkey_url,
        "DELTAPOST_STORE": f"file://{tmp_path / 'store'}",
        "DELTAPOST_LEDGER_URL": migrated_url,
        "DELTAPOST_SIGNING_KEY_FILE": str(tmp_path / "aggregator.key"),
        "DELTAPOST_AGGREGATOR_HEALTH_PORT": "0",
        "DELTAPOST_AGGREGATOR_NAME": "killed-and-restarted",
        "DELTAPOST_POLL_SECONDS": "0.1",
    }
    post_round(pipeline, 0)

    # Given an aggregator that dies at the step the second time it comes there
    process = aggregator(environment, output, DELTAPOST_FAIL_AT=f"kill:{point}:2")
    posted = 1
    deadline = time.monotonic() + 40
    while process.poll() is None:
        assert time.monotonic() < deadline, output.read_text()
        if posted < ROUNDS and pipeline.head() >= posted:
            post_round(pipeline, posted)
            posted += 1
        time.sleep(0.05)
    assert process.returncode == -signal.SIGKILL

    # When it is started again
    process = aggregator(environment, output)
    try:
        for version in range(posted, ROUNDS):
            eventually(lambda version=version: pipeline.head() >= version, output.read_text())  # type: ignore[misc]
            post_round(pipeline, version)
        eventually(lambda: announced(pipeline) == {1, ROUNDS}, output.read_text())
        eventually(lambda: output.read_bytes().count(b"aggregator_started") == 2, output.read_text())
    finally:
        process.terminate()
        process.wait(30)
    log.close()

    # Then the bucket and the ledger say what they would have said
    assert process.returncode == 0
    assert (pipeline.records(), pipeline.dump()) == undisturbed(tmp_path)
