"""Payloads in memory have one bound, whichever fragment they are of."""

from __future__ import annotations

from deltapost_aggregator.cache import PayloadMemory


def test_all_fragments_share_one_bound_and_the_oldest_go_first() -> None:
    memory = PayloadMemory(100)
    first, second = memory.part("run", 0), memory.part("run", 1)
    for number in range(10):
        first.put(bytes([number]) * 32, bytes(20))
        second.put(bytes([number]) * 32, bytes(20))
        assert memory.held <= 100

    assert first.get(bytes(32)) is None
    assert second.get(bytes([9]) * 32) == bytes(20)


def test_a_fragment_forgets_only_what_is_its_own() -> None:
    memory = PayloadMemory(1_000)
    first, second = memory.part("run", 0), memory.part("run", 1)
    first.put(b"same", b"12345")
    second.put(b"same", b"12345")

    first.clear()

    assert (first.get(b"same"), second.get(b"same")) == (None, b"12345")
    assert memory.held == 5
    second.clear()
    assert memory.held == 0


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    memory = PayloadMemory(4)
    memory.part("run", 0).put(b"large", b"12345")

    assert (memory.part("run", 0).get(b"large"), memory.held) == (None, 0)
