"""Memory that rounds hand on to each other is nobody else's while somebody sees it."""

from __future__ import annotations

import pytest

from deltapost.adapters import buffers
from deltapost.adapters.buffers import Outputs

SIZE = 3 * 1024 * 1024


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_kept", buffers._Kept())


def test_a_buffer_is_handed_on_once_its_last_view_is_gone() -> None:
    # Given a round's output of which one tensor's bytes are still held
    first = Outputs([SIZE, 64])
    where, held = first.addresses[0], first.view(1)
    first.write(1, b"anchor")
    del first

    # When the next round needs as much
    second = Outputs([SIZE, 64])

    # Then it gets other memory, and what is held keeps its bytes
    second.write(1, b"others")
    assert second.addresses[0] != where
    assert bytes(held[:6]) == b"anchor"

    # And once nobody holds it any more, the round after that gets it
    del held
    third = Outputs([SIZE, 64])
    assert third.addresses[0] == where
    assert second.addresses[0] != where


def test_no_more_is_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "KEPT_BYTES", 2 * SIZE)
    rounds = [Outputs([SIZE]) for _ in range(3)]

    rounds.clear()

    assert [one.size >= SIZE for one in buffers._kept._buffers] == [True]


def test_a_tensor_s_bytes_cannot_be_written_through_their_view() -> None:
    view = Outputs([SIZE]).view(0)

    assert view.readonly
    assert len(view) == SIZE
