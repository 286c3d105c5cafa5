"""A real process, killed with SIGKILL inside decoding until the entry is skipped: the stream goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltapost.ledger.engine import open_ledger
from deltapost.limits import MAX_STARTS_AT_ENTRY
from deltapost.serialization.names import envelope_stream
from deltapost.stores.directory import DirectoryStore
from deltapost.streams.redis import RedisLog
from fixtures.pipeline import AGGREGATOR_KEY, LEARNERS, RUN, Pipeline, arrays
from hostile.deadly_aggregator import DEADLY

PROGRAM = Path(__file__).with_name("deadly_aggregator.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_entries_that_kill_a_real_process_are_skipped_and_the_round_closes_without_them(
    migrated_sqlite_url: str, valkey_url: str, tmp_path: Path
) -> None:
    # Given a message and a payload of a learner whose decoding kills, before an honest round
    AGGREGATOR_KEY.save(tmp_path / "aggregator.key")
    ledger, log = open_ledger(migrated_sqlite_url), RedisLog(valkey_url)
    pipeline = Pipeline(ledger, store=DirectoryStore(tmp_path / "store"), log=log)
    pipeline.register("mallory")
    log.append(envelope_stream(RUN, 0), DEADLY + b" message")
    pipeline.post("mallory", DEADLY + bytes(100))
    for number, learner in enumerate(LEARNERS):
        pipeline.post(learner, arrays(number + 1))

    # When an aggregator is started again whenever it dies
    environment = {
        "DELTAPOST_REDIS_URL": valkey_url,
        "DELTAPOST_STORE": f"file://{tmp_path / 'store'}",
        "DELTAPOST_LEDGER_URL": migrated_sqlite_url,
        "DELTAPOST_SIGNING_KEY_FILE": str(tmp_path / "aggregator.key"),
        "DELTAPOST_AGGREGATOR_HEALTH_PORT": "0",
        "DELTAPOST_AGGREGATOR_NAME": "killed-and-restarted",
        "DELTAPOST_POLL_SECONDS": "0.1",
        "DELTAPOST_LEASE_SECONDS": "1",  # whoever starts again waits for its predecessor's to end
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)], env={**os.environ, **environment}, stdout=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 240
        while pipeline.head() < 1:
            assert time.monotonic() < deadline, "the round did not close"
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=60)

    # Then both were skipped after so many starts, and the first death found each
    deaths, status = map(int, output.split())
    assert status == 0
    assert deaths == 2 * MAX_STARTS_AT_ENTRY + 1
    assert pipeline.record(1).unverified == {"malformed": 2}
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)
    ledger.close()
    log.close()
