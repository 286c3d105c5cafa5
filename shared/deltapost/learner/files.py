"""Small durable files: written whole or not at all, and there after a power cut."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from deltapost.errors import ConfigurationError


def write_durably(path: Path, data: bytes) -> None:
    """Replaces the file by `data`: readers see the old bytes or the new ones, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames and removals in the directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DirectoryLock:
    """Keeps a second process out of a directory for as long as this one lives."""

    def __init__(self, directory: Path, *, what: str) -> None:
        self._file = open(directory / "lock", "a+b")  # noqa: SIM115  held until release
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigurationError(
                f"another process is {what} already (its state is in {str(directory)!r})",
                hint="give each process its own learner id, or stop the other one",
            ) from None

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
