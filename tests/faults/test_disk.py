"""A full disk under the learner's spool and the directory store: nothing is acknowledged, nothing is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deltapost.errors import StateUnavailable
from deltapost.stores.directory import DirectoryStore
from fixtures.served import CLAIMS, Served, small_model
from fixtures.training import training


class FullDisk:
    """While it is on, every file fails with ENOSPC when its bytes are to reach the disk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.refused = 0
        fsync = os.fsync

        def full(descriptor: int) -> None:
            if self.on:
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        patch.setattr(os, "fsync", full)

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        self.on = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def test_a_full_disk_under_the_directory_store_shows_in_readiness_and_is_waited_out(
    parts: Served, tmp_path: Path, disk: FullDisk
) -> None:
    parts.store = DirectoryStore(tmp_path / "store")  # type: ignore[assignment]
    with training(parts) as trained:
        trained.to(1)
        parts.stop()
        trained.publish(1)
        disk.begin()
        trained.health = parts.start().services.health
        trained.says("free space or repair the disk of")
        disk.end()
        trained.to(3)
        trained.whole(3)
    assert disk.refused > 0


def test_what_cannot_be_journalled_is_not_published_and_may_be_published_once_there_is_space(
    parts: Served, disk: FullDisk
) -> None:
    with training(parts) as trained:
        trained.to(1)
        disk.begin()
        with pytest.raises(StateUnavailable, match="free space there"):
            trained.run.publish_contribution(0, 1, delta=small_model(0.5), **CLAIMS)
        assert trained.run.version(0) == 1
        assert trained.run._journal.find(0, 1) is None
        disk.end()

        trained.to(3)
        trained.whole(3)
