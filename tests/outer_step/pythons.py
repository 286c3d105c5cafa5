"""Other Pythons of this machine, each with what golden vectors need below build/pythons.

An interpreter counts that starts (a version manager's shim may not), is a final release of CPython, and newer
than the oldest we support; of each minor version one.

Failure modes. RuntimeError, with pip's words, where the packages cannot be had.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build"
OLDEST: Final = (3, 11)
#: What `outer_step.vectors` imports, directly or not.
PACKAGES: Final = ("cryptography", "msgpack", "numpy", "pydantic")
#: What an interpreter is asked.
_QUESTION: Final = (
    "import json, sys; print(json.dumps([sys.implementation.name, *sys.version_info[:4], sys.executable]))"
)


@cache
def others() -> dict[str, Path]:
    """By minor version ("3.13"), every Python that starts here, but the running one's."""
    found: dict[str, Path] = {}
    for candidate in _candidates():
        try:
            done = subprocess.run([candidate, "-c", _QUESTION], capture_output=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        name, major, minor, _, level, executable = json.loads(done.stdout)
        version = (major, minor)
        if name == "cpython" and level == "final" and version >= OLDEST and version != sys.version_info[:2]:
            found.setdefault(f"{major}.{minor}", Path(executable))
    return dict(sorted(found.items()))


def _candidates() -> Iterator[Path]:
    for folder in map(Path, os.get_exec_path()):
        yield from sorted(folder.glob("python3.[1-9][0-9]"))
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    yield from sorted(versions.glob("3.*/bin/python3"), reverse=True)


def packages(version: str, platforms: Sequence[str] = ()) -> Path:
    """A folder with PACKAGES for a Python of that minor version, made the first time; in `constraints.txt`'s
    versions, for this machine or for `platforms`."""
    pins = (ROOT / "constraints.txt").read_bytes()
    key = hashlib.sha256(repr((PACKAGES, platforms)).encode() + pins).hexdigest()[:12]
    folder = BUILD / "pythons" / f"{version}-{platforms[0] if platforms else 'here'}-{key}"
    if not folder.exists():
        # Several processes may make it: each its own, and one is kept.
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(making, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += [
            "--no-compile",
            "--only-binary=:all:",
            "--python-version",
            version,
            "--target",
            str(making),
        ]
        command += [word for platform in platforms for word in ("--platform", platform)]
        command += ["-c", str(ROOT / "constraints.txt"), *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            shutil.rmtree(making, ignore_errors=True)
            raise RuntimeError(
                f"{', '.join(PACKAGES)} for Python {version} cannot be had: {done.stderr[-2_000:]}"
            )
        try:
            making.rename(folder)
        except OSError:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def environment(packages: Path | None = None) -> dict[str, str]:
    """For a process that imports deltapost and the tests from this checkout, and packages from a folder."""
    folders = [ROOT / "shared", ROOT / "tests", *([packages] if packages else [])]
    kept = {name: value for name, value in os.environ.items() if not re.match("PYTHON|VIRTUAL_ENV", name)}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
