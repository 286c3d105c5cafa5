"""Objects are fetched side by side, hashed as they come in, and kept where there is room for them."""

from __future__ import annotations

import errno
import hashlib
import threading
from functools import partial
from pathlib import Path

import pytest

from deltapost.adapters import mapped
from deltapost.adapters.buffers import SMALLEST
from deltapost.errors import ObjectMissing, SpoolUnavailable
from deltapost.serialization.documents import ObjectRef
from deltapost.stores import Blob
from deltapost.stores.directory import DirectoryStore
from deltapost.stores.memory import MemoryStore
from deltapost_aggregator.objects import put_verified
from deltapost_aggregator.spool import Spool
from deltapost_aggregator.transfers import Transfers, sha256_of

KEY = "run/deltas/ada/0000/0000000000/x"
LARGE = bytes(range(256)) * (SMALLEST // 128)


def ref(data: bytes) -> ObjectRef:
    return ObjectRef(sha256=hashlib.sha256(data).digest(), size=len(data))


@pytest.mark.parametrize("data", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_an_object_is_had_only_with_the_bytes_that_were_expected(tmp_path: Path, data: bytes) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put(KEY, data)
    transfers = Transfers(store, Spool(tmp_path), 4)

    found = transfers.fetch(KEY, ref(data))
    assert (found.data, found.size) == (data, len(data))
    assert sha256_of(found.data or b"") == ref(data).sha256
    assert found.data is None or found.data.readonly

    other = ObjectRef(sha256=bytes(32), size=len(data))
    assert transfers.fetch(KEY, other).data is None
    for size in {len(data) + 1, max(len(data) - 1, 0)} - {len(data)}:
        found = transfers.fetch(KEY, ObjectRef(sha256=hashlib.sha256(data[:size]).digest(), size=size))
        assert (found.data, found.size) == (None, len(data))


def test_what_is_large_lies_in_the_spool_and_leaves_nothing_there(tmp_path: Path) -> None:
    store, directory = MemoryStore(), tmp_path / "spool"
    directory.mkdir()
    store.put(KEY, LARGE)

    found = Transfers(store, Spool(directory), 1).fetch(KEY, ref(LARGE))

    assert found.data is not None
    assert mapped.behind([mapped.address_of(found.data)])
    assert list(directory.iterdir()) == []


def test_a_missing_object_takes_nothing_of_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "allocate", lambda *_: pytest.fail("allocated"))

    with pytest.raises(ObjectMissing):
        Transfers(MemoryStore(), Spool(tmp_path), 1).fetch(KEY, ref(LARGE))


def test_a_full_spool_is_told_by_its_directory_and_used_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that is full but for what the spool keeps for later
    spool = Spool(tmp_path)
    del (kept := [spool.take(3 * SMALLEST)])[:]
    real, room = mapped.allocate, 0

    def allocate(directory: Path, size: int) -> mapped.Bytes:
        if size > room:
            raise OSError(errno.ENOSPC, "full")
        return real(directory, size)

    monkeypatch.setattr(mapped, "allocate", allocate)
    assert spool.buffers.kept()

    # When more is wanted
    with pytest.raises(SpoolUnavailable) as caught:
        spool.take(8 * SMALLEST)

    # Then the error says where, is one to wait for, and what was kept was given up for it
    assert str(tmp_path) in str(caught.value)
    assert "DELTAPOST_SPOOL_DIRECTORY" in str(caught.value)
    assert caught.value.retryable
    assert not kept
    assert spool.buffers.kept() == []

    room = 9 * SMALLEST
    assert spool.take(8 * SMALLEST).size == 8 * SMALLEST


def test_calls_go_on_side_by_side_and_answer_in_order() -> None:
    together = threading.Barrier(3, timeout=30)

    def call(number: int) -> int:
        together.wait()
        return number

    transfers = Transfers(MemoryStore(), Spool(), 3)
    assert list(transfers.each([partial(call, number) for number in range(3)])) == [0, 1, 2]


def test_when_one_call_fails_the_others_end_before_anybody_hears_of_it() -> None:
    ended = []
    go_on = threading.Event()

    def fails() -> None:
        go_on.set()
        raise ObjectMissing(KEY)

    def takes_longer() -> None:
        go_on.wait(30)
        ended.append("it")

    with pytest.raises(ObjectMissing):
        list(Transfers(MemoryStore(), Spool(), 2).each([fails, takes_longer]))
    assert ended == ["it"]


def test_with_one_thread_a_call_begins_when_it_is_asked_for_and_none_after_one_that_failed() -> None:
    called = []

    def call(number: int) -> None:
        called.append(number)
        if number == 1:
            raise ObjectMissing(KEY)

    transfers = Transfers(MemoryStore(), Spool(), 1)
    result = transfers.start(partial(call, 0))
    assert called == []
    result()
    with pytest.raises(ObjectMissing):
        list(transfers.each([partial(call, number) for number in (1, 2)]))
    assert called == [0, 1]


@pytest.mark.parametrize("at", [0, SMALLEST, len(LARGE) - 1])
def test_one_byte_that_reads_back_otherwise_is_noticed(at: int) -> None:
    class Altering(MemoryStore):
        def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
            blob = super().get(key, offset=offset, length=length)
            altered = bytearray(blob.data)
            altered[at] ^= 1
            return Blob(bytes(altered), blob.size)

    put_verified(MemoryStore(), KEY, memoryview(LARGE))
    with pytest.raises(Exception, match="reads back as"):
        put_verified(Altering(), KEY, memoryview(LARGE))


def test_an_object_that_reads_back_shorter_or_longer_is_noticed() -> None:
    for cut in (lambda data: data[:-1], lambda data: data + b"x"):

        class Cutting(MemoryStore):
            def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
                blob = super().get(key, offset=offset, length=length)
                data = cut(blob.data)  # noqa: B023
                return Blob(data, len(data))

        with pytest.raises(Exception, match="reads back as"):
            put_verified(Cutting(), KEY, LARGE)
