"""How much memory an attack takes: each runs in a process of its own, forked from one that has loaded all.

`attacks` of a module are functions named in its ATTACKS; `python FILE` runs them and prints, for each, the
growth of the process's peak (VmHWM on Linux, ru_maxrss elsewhere) over what it held at the start, in bytes.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Attack: TypeAlias = Callable[[], object]

MIB = 1024 * 1024
_STATUS = Path("/proc/self/status")


def peaks(program: Path, *, timeout: float = 570.0) -> dict[str, float]:
    """MiB that each of the program's attacks took at its peak."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(program.parents[1])}
    finished = subprocess.run(
        [sys.executable, str(program)], capture_output=True, env=environment, timeout=timeout, check=False
    )
    assert finished.returncode == 0, finished.stderr.decode()[-4_000:]
    measured: dict[str, float] = json.loads(finished.stdout)
    return measured


def run(attacks: Mapping[str, Callable[[], Attack]]) -> None:
    """Runs each attack in a fork and prints the growths. The values prepare, and give what runs."""
    print(json.dumps({name: _forked(prepare) for name, prepare in attacks.items()}))


def _forked(prepare: Callable[[], Attack]) -> float:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attack = prepare()
            gc.collect()
            before = _start()
            attack()
            os.write(writing, str((_peak() - before) / MIB).encode())
            code = 0
        except BaseException:  # noqa: BLE001  whatever it is, it must not leave the fork
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        grown = pipe.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise SystemExit(f"the attack {prepare.__name__} ended with status {status}")
    return round(float(grown), 1)


def _start() -> int:
    """Resets the peak where that can be done; returns the bytes held now."""
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")
        return _field("VmRSS")
    return _peak()


def _peak() -> int:
    if _STATUS.exists():
        return _field("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _field(name: str) -> int:
    line: Any = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
