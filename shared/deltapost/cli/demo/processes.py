"""The demo's processes: each in its own log file, all ended when the demo ends, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deltapost.errors import ConfigurationError

STOP_SECONDS = 15.0


class Child:
    """A process of this Python, with stderr in a log file and, where wanted, JSON lines from stdout."""

    def __init__(
        self, name: str, module: str, arguments: list[str], environment: Mapping[str, str], log: Path
    ):
        self.name = name
        self.log = log
        self._log: IO[bytes] = open(log, "ab")  # noqa: SIM115  closed in stop
        self.process = subprocess.Popen(  # noqa: S603  our own modules, no shell
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone
        )

    def follow(self, lines: LineSink) -> None:
        """Hands every JSON line of stdout to `lines`, from a thread."""

        def read() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                lines.take(self.name, event)

        threading.Thread(target=read, name=f"follow {self.name}", daemon=True).start()

    def check(self, reason: str | None = None) -> None:
        """Raises ConfigurationError when the process has failed: with `reason`, or the end of its log."""
        status = self.process.poll()
        if status not in (None, 0):
            tail = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigurationError(
                f"{self.name} ended with status {status}: {reason or ' '.join(tail) or 'it wrote nothing'}",
                hint=f"its log is {self.log}",
            )

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def ask_to_stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL when that is not obeyed."""
        self.ask_to_stop()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()


@dataclass
class LearnerProgress:
    """What a learner reported last. Totals hold over its restarts."""

    step: int = 0
    steps: int = 0
    loss: float | None = None
    versions: list[int] = field(default_factory=list)
    bytes_sent: int = 0
    bytes_received: int = 0
    state: str = "starting"
    failure: str | None = None


class LineSink:
    """The learners' newest progress, gathered from their JSON lines. Thread-safe."""

    def __init__(self, names: list[str]) -> None:
        self._lock = threading.Lock()
        self._now = {name: LearnerProgress() for name in names}
        self._before = dict.fromkeys(names, (0, 0, 0))

    def take(self, name: str, event: dict[str, Any]) -> None:
        with self._lock:
            progress, before = self._now[name], self._before[name]
            match event.get("event"):
                case "joined":
                    progress.versions, progress.step = event["versions"], event["step"]
                    progress.state = "training"
                case "progress" | "done":
                    progress.step, progress.loss = event["step"], event["loss"] or progress.loss
                    progress.versions = event["versions"]
                    progress.steps = before[0] + event["steps"]
                    progress.bytes_sent = before[1] + event["bytes_sent"]
                    progress.bytes_received = before[2] + event["bytes_received"]
                    progress.state = "done" if event["event"] == "done" else "training"
                case "failed":
                    progress.failure = event["reason"]

    def killed(self, name: str) -> None:
        """The process is gone; what it counted so far is kept."""
        with self._lock:
            progress = self._now[name]
            self._before[name] = (progress.steps, progress.bytes_sent, progress.bytes_received)
            progress.state = "killed"

    def restarted(self, name: str) -> None:
        with self._lock:
            self._now[name].state = "starting"

    def failure(self, name: str) -> str | None:
        """Why the learner said it ended, if it said so."""
        with self._lock:
            return self._now[name].failure

    def snapshot(self) -> dict[str, LearnerProgress]:
        with self._lock:
            return {
                name: LearnerProgress(**{**vars(progress), "versions": list(progress.versions)})
                for name, progress in self._now.items()
            }
