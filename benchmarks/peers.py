"""Peers from PyPI, each in a virtual environment of its own below build/peers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

BUILD = Path(__file__).parents[1] / "build" / "peers"
#: What each needs beside itself, and the oldest Python that takes it.
PEERS: dict[str, tuple[list[str], tuple[int, int]]] = {
    "gradientmail==0.0.2": (["torch", "numpy", "boto3"], (3, 12)),
    "flwr==1.42.0": (["numpy"], (3, 11)),
}


def python_of(peer: str, *, python: str | None, console: Console) -> Path:
    """The interpreter of the peer's environment, made the first time. `python` names what makes it."""
    others, oldest = PEERS[peer]
    folder = BUILD / peer.replace("==", "-")
    ready = folder / ".ready"
    wanted = " ".join([peer, *others])
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        maker = python or _found(oldest)
        console.print(f"installing {peer} into {folder} with {maker}: {', '.join([peer, *others])}")
        subprocess.run([maker, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, peer, *others], check=True)
        ready.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


def _found(oldest: tuple[int, int]) -> str:
    if sys.version_info >= oldest:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(oldest[1], oldest[1] + 4)]
    for name in names:
        path = shutil.which(name)
        # A version manager's shim may be there for a Python that is not.
        if path and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
            return path
    sys.exit(f"none of {', '.join(names)} is here: name one with --peer-python PATH")
