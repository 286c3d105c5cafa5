"""Small durable files: written whole or not at all, and there after a power cut."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType

from deltapost.errors import ConfigurationError, StateUnavailable


def write_durably(path: Path, data: bytes) -> None:
    """Replaces the file by `data`: readers see the old bytes or the new ones. Raises StateUnavailable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StateUnavailable(
            f"the learner's state {str(path)!r} cannot be written: {error.strerror}",
            hint="free space there, or move DELTAPOST_STATE_DIR",
        ) from None


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
