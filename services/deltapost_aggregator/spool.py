"""Spool: where payloads, states and results lie that are too large for memory: in files without a name.

Nothing in it outlives the process, and nothing in it is the only copy: what is lost is fetched again.

Failure modes. A full or broken disk is SpoolUnavailable, before anything is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from deltapost.adapters import mapped
from deltapost.adapters.buffers import Buffers, Bytes
from deltapost.errors import SpoolUnavailable
from deltapost.limits import RECYCLED_BYTES


class Spool:
    """Buffers in files of `directory`; small ones are in memory. Safe for all threads."""

    def __init__(self, directory: str | os.PathLike[str] = "") -> None:
        self.directory = Path(directory or tempfile.gettempdir())
        self.buffers = Buffers(RECYCLED_BYTES, self._allocate)

    def take(self, size: int) -> Bytes:
        """A buffer of `size` bytes, with anything in it. Raises SpoolUnavailable."""
        return self.buffers.take(size)

    def _allocate(self, size: int) -> Bytes:
        try:
            return mapped.allocate(self.directory, size)
        except OSError:
            self.buffers.drop()  # what was kept for later may be what is missing now
        try:
            return mapped.allocate(self.directory, size)
        except OSError as error:
            raise SpoolUnavailable(
                f"no room for {size} bytes in the spool {self.directory}: {os.strerror(error.errno or 0)}",
                hint="free space there, or name another directory: DELTAPOST_SPOOL_DIRECTORY",
            ) from error
