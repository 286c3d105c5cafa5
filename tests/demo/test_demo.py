"""The demo itself, small: real processes, a learner killed and restarted, and what it says at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.s3 import S3Server


def demo(directory: Path, *options: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "deltapost.cli.main", "demo", f"--directory={directory}", "--json", *options],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=170,
    )
    logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(directory.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


@pytest.mark.timeout(180)
def test_learners_train_through_it_all_although_one_is_killed(tmp_path: Path) -> None:
    outcome = demo(tmp_path / "demo", "--learners=2", "--rounds=2")

    summary = outcome["summary"]
    assert outcome["rounds"] >= 8
    assert summary["loss_after"] < summary["loss_before"] - 0.5
    assert summary["bytes_sent"] * 50 < 4 * summary["parameters"] * summary["steps"]
    assert {one["learner"] for one in outcome["participations"]} <= {"learner-0", "learner-1"}
    assert "accepted" in outcome["verdicts"]
    assert Path(outcome["ledger"].removeprefix("sqlite:///")).exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_runs_on_a_real_s3_server_a_postgres_and_a_valkey_of_ones_own(
    tmp_path: Path, seaweed_s3: S3Server, postgres_url: str, valkey_url: str
) -> None:
    outcome = demo(
        tmp_path / "demo",
        "--learners=2",
        "--rounds=1",
        "--delta=BF16",
        "--commit=F8_E4M3",
        f"--store=s3://{seaweed_s3.bucket}/demo",
        f"--ledger={postgres_url}",
        f"--redis-url={valkey_url}",
        environment=seaweed_s3.environment,
    )

    assert outcome["rounds"] >= 4
    assert outcome["store"] == f"s3://{seaweed_s3.bucket}/demo"
    assert outcome["ledger"].startswith("postgresql://")
