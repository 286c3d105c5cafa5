"""A real learner that is killed, stopped or left without a reply at a step loses no contribution."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.points import LEARNER_POINTS, MODES
from deltapost.stores.directory import DirectoryStore
from deltapost.streams.redis import RedisLog
from fixtures.history import History, check_whole, history
from fixtures.pipeline import AGGREGATOR_KEY, Pipeline, arrays, learner_signing_key, plain_config
from fixtures.processes import Zygote, eventually

ROUNDS = 3
SEED = 1
#: What runs in `make test`.
SAMPLED = ("kill", "learner.payload_put", 2)
CONFIG = plain_config(quorum_size=1, delta_dtype="F8_E4M3")


def cases() -> list[ParameterSet]:
    return [
        pytest.param(
            mode,
            point,
            times_through,
            id=f"{mode}-{point}-{times_through}",
            marks=[]
            if (mode, point, times_through) == ("kill", "learner.payload_put", 2)
            else [pytest.mark.slow],
        )
        for mode in MODES
        for point in LEARNER_POINTS
        for times_through in (1, 2)
    ]


def undisturbed(ledger: Ledger) -> History:
    """What the learner's contributions make of the run when nothing happens to it."""
    pipeline = Pipeline(ledger, config=CONFIG, learners=("ada",))
    for version in range(ROUNDS):
        pipeline.post("ada", arrays(10 * version + SEED), version=version, tokens=1000 + SEED, loss=None)
        pipeline.run_to(version + 1)
    return history(pipeline, restored=True)


@pytest.mark.parametrize(("mode", "point", "times_through"), cases())
def test_a_fault_of_a_real_learner_at_any_step_changes_no_record(
    zygote: Zygote,
    migrated_sqlite_url: str,
    migrated_sqlite: Path,
    valkey_url: str,
    tmp_path: Path,
    mode: str,
    point: str,
    times_through: int,
) -> None:
    other = tmp_path / "undisturbed.db"
    other.write_bytes(migrated_sqlite.read_bytes())
    reference = open_ledger(f"sqlite:///{other}")
    expected = undisturbed(reference)
    reference.close()
    ledger, log = open_ledger(migrated_sqlite_url), RedisLog(valkey_url)
    pipeline = Pipeline(
        ledger, config=CONFIG, store=DirectoryStore(tmp_path / "store"), log=log, learners=("ada",)
    )
    AGGREGATOR_KEY.save(tmp_path / "aggregator.key")
    (tmp_path / "state" / "keys").mkdir(parents=True)
    learner_signing_key("ada").save(tmp_path / "state" / "keys" / "ada.key")
    environment = {
        "DELTAPOST_REDIS_URL": valkey_url,
        "DELTAPOST_STORE": (tmp_path / "store").as_uri(),
        "DELTAPOST_LEDGER_URL": migrated_sqlite_url,
        "DELTAPOST_AGGREGATOR_HEALTH_PORT": "0",
        "DELTAPOST_POLL_SECONDS": "0.05",
        "DELTAPOST_REPOST_SECONDS": "0.3",
        "DELTAPOST_STATE_DIR": str(tmp_path / "state"),
        "LEARNER": "ada",
        "SEED": str(SEED),
        "ROUNDS": str(ROUNDS),
    }
    output = tmp_path / "learner.log"
    signing = {"DELTAPOST_SIGNING_KEY_FILE": str(tmp_path / "aggregator.key")}
    aggregator = zygote.start("aggregator", {**environment, **signing}, tmp_path / "aggregator.log")

    # Given a learner to which it happens
    fail_at = {"DELTAPOST_FAIL_AT": f"{mode}:{point}:{times_through}"}
    learner = zygote.start("learner", {**environment, **fail_at}, output)
    if mode == "kill":
        assert learner.wait() == -signal.SIGKILL
        learner = zygote.start("learner", environment, output)
    elif mode == "stop":
        eventually(lambda: learner.look().stopped, output.read_text)
        learner.send(signal.SIGCONT)

    # When it is there again
    assert learner.wait(90) == 0, output.read_text()
    aggregator.send(signal.SIGTERM)
    assert aggregator.wait() == 0

    # Then the chain and its contributions are the undisturbed run's
    assert ("lost at" in output.read_text()) == (mode == "lost")
    assert history(pipeline, restored=True) == expected
    check_whole(pipeline)
    log.close()
    ledger.close()
