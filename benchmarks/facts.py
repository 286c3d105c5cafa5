"""What every record of a benchmark says beside its numbers: commit, date, machine and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def where(target: str) -> dict[str, Any]:
    """What a record says of the machine, the code and the command; `target` is make's."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, cwd=RECORDS.parent, check=False
        )
        return done.stdout.strip()

    arguments = f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed_files": len(git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "command": f"make {target}{arguments}",
    }


def _processor() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def keep(name: str, result: dict[str, Any]) -> Path:
    """Writes the record beside the others; returns where."""
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{result['date']}-{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
