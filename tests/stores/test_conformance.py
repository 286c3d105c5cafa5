"""What every ObjectStore promises, over all of them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deltapost.adapters.mapped import allocate
from deltapost.errors import ObjectConflict, ObjectMissing, StoreError
from deltapost.stores import Blob, ObjectInfo, ObjectStore
from deltapost.stores.probe import probe
from deltapost.stores.reading import PIECE_BYTES, read

PART_BYTES = 8 * 1024 * 1024
KEY = "run/deltas/learner/0001/0000000007/digest"


def test_a_store_satisfies_the_protocol(store: ObjectStore) -> None:
    assert isinstance(store, ObjectStore)


def test_a_put_creates_once_and_repeating_it_changes_nothing(store: ObjectStore) -> None:
    assert store.put(KEY, b"bytes", metadata={"envelope": "first"}) is True
    assert store.put(KEY, b"bytes", metadata={"envelope": "second"}) is False
    assert store.get(KEY) == Blob(b"bytes", 5, {"envelope": "first"})


def test_other_bytes_under_a_taken_key_are_a_conflict_that_names_the_key(store: ObjectStore) -> None:
    store.put(KEY, b"bytes")
    for other in (b"", b"bytez", b"bytes, and more"):
        with pytest.raises(ObjectConflict) as caught:
            store.put(KEY, other)
        assert caught.value.key == KEY
        assert KEY in str(caught.value)
        assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert store.get(KEY).data == b"bytes"


def _race(put: Callable[[int], object]) -> list[object]:
    """Eight threads at once: what each call returned, or the conflict it raised."""
    barrier = threading.Barrier(8)

    def contestant(number: int) -> object:
        barrier.wait()
        try:
            return put(number)
        except ObjectConflict as conflict:
            return conflict

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(contestant, range(8)))


def _attempts(store: ObjectStore) -> int:
    return 1 if "s3://" in repr(store) else 20


def test_of_eight_racing_writers_of_different_bytes_exactly_one_wins(store: ObjectStore) -> None:
    for attempt in range(_attempts(store)):
        key = f"race/{attempt}"
        results = _race(lambda number, key=key: store.put(key, b"writer %d" % number))  # type: ignore[misc]
        assert results.count(True) == 1
        assert sum(isinstance(each, ObjectConflict) for each in results) == 7
        assert store.get(key).data == b"writer %d" % results.index(True)


def test_of_eight_racing_writers_of_the_same_bytes_all_succeed_and_one_created(store: ObjectStore) -> None:
    for attempt in range(_attempts(store)):
        key = f"race/{attempt}"
        results = _race(lambda _, key=key: store.put(key, b"the same"))  # type: ignore[misc]
        assert sorted(map(str, results)) == ["False"] * 7 + ["True"]


RANGES = [
    (0, None, b"0123456789"),
    (0, 4, b"0123"),
    (3, 4, b"3456"),
    (3, None, b"3456789"),
    (9, 1, b"9"),
    (0, 10, b"0123456789"),
    (0, 11, b"0123456789"),
    (8, 100, b"89"),
    (4, 0, b""),
    (0, 0, b""),
    (10, None, b""),
    (10, 1, b""),
    (99, 5, b""),
]


def test_a_range_gives_its_bytes_and_the_whole_size(store: ObjectStore) -> None:
    store.put(KEY, b"0123456789", metadata={"envelope": "e"})
    for offset, length, expected in RANGES:
        assert store.get(KEY, offset=offset, length=length) == Blob(expected, 10, {"envelope": "e"})


def test_a_negative_range_is_a_mistake_of_the_caller(store: ObjectStore) -> None:
    for offset, length in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            store.get(KEY, offset=offset, length=length)


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    assert store.put(KEY, b"") is True
    assert store.put(KEY, b"") is False
    assert store.head(KEY).size == 0
    assert store.get(KEY) == Blob(b"", 0)
    assert store.get(KEY, length=10) == Blob(b"", 0)
    assert [each.size for each in store.list("")] == [0]


@pytest.mark.parametrize("size", [PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 1])
def test_an_object_around_and_above_the_part_size_is_created_once_too(store: ObjectStore, size: int) -> None:
    data = (b"0123456789abcde" * (size // 15 + 1))[:size]
    assert store.put(KEY, data, metadata={"envelope": "e"}) is True
    assert store.put(KEY, data) is False
    with pytest.raises(ObjectConflict):
        store.put(KEY, data[:-1] + b"!")
    with pytest.raises(ObjectConflict):
        store.put(KEY, b"small")
    read = store.get(KEY)
    assert (read.size, dict(read.metadata)) == (size, {"envelope": "e"})
    assert hashlib.sha256(read.data).digest() == hashlib.sha256(data).digest()
    assert store.get(KEY, offset=size - 3).data == data[-3:]


def test_writers_that_race_with_the_same_bytes_above_the_part_size_all_succeed(store: ObjectStore) -> None:
    data = bytes(range(256)) * (PART_BYTES // 256 + 1)
    results = _race(lambda _: store.put("race/large", data))
    assert True in results
    assert set(results) <= {True, False}
    assert store.get("race/large").data == data


# Neither SeaweedFS nor moto: of conditional CompleteMultipartUpload that run at once, several succeed there.
@pytest.mark.parametrize("store", ["memory", "directory"], indirect=True)
def test_of_writers_that_race_with_different_bytes_above_the_part_size_one_wins(store: ObjectStore) -> None:
    results = _race(lambda number: store.put("race/large", bytes([number]) * (PART_BYTES + 1)))
    assert results.count(True) == 1
    assert sum(isinstance(each, ObjectConflict) for each in results) == 7
    assert store.get("race/large", length=1).data == bytes([results.index(True)])


def test_metadata_of_1900_bytes_comes_back_from_get_and_head(store: ObjectStore) -> None:
    described = {"envelope": "A-z/+=" * 316 + "end:", "kind": "x y"}
    assert len(described["envelope"]) == 1_900
    store.put(KEY, b"bytes", metadata=described)
    assert store.head(KEY) == ObjectInfo(KEY, 5, described)
    assert store.get(KEY, offset=9).metadata == described
    assert [dict(each.metadata) for each in store.list("")] == [{}]


UNUSABLE_METADATA = [
    {"envelope": "x" * 2_000},
    {"envelope": "line\nbreak"},
    {"envelope": "é"},
    {"envelope": " outer space"},
    {"envelope": "a\0b"},
    {"Envelope": "x"},
    {"": "x"},
    {"a_b": "x"},
]


def test_metadata_that_some_store_could_not_carry_is_refused_by_all(store: ObjectStore) -> None:
    for metadata in UNUSABLE_METADATA:
        with pytest.raises(StoreError, match="metadata"):
            store.put(KEY, b"bytes", metadata=metadata)
    assert list(store.list("")) == []


def test_a_key_that_holds_nothing_is_definitely_missing(store: ObjectStore) -> None:
    store.put("run/records/0001/0000000001", b"record")
    for look in (store.get, store.head):
        with pytest.raises(ObjectMissing) as caught:
            look("run/records/0001/0000000002")
        assert caught.value.key == "run/records/0001/0000000002"
    with pytest.raises(ObjectMissing):
        store.get("run/records")


def test_a_deleted_object_is_gone_and_its_key_free(store: ObjectStore) -> None:
    store.put(KEY, b"bytes", metadata={"envelope": "old"})
    store.delete(KEY)
    store.delete(KEY)
    with pytest.raises(ObjectMissing):
        store.head(KEY)
    assert list(store.list("")) == []
    assert store.put(KEY, b"other bytes") is True
    assert store.get(KEY) == Blob(b"other bytes", 11, {})


def test_a_listing_holds_what_begins_with_the_prefix_in_the_order_of_keys(store: ObjectStore) -> None:
    keys = ["r/a-b", "r/a.b/x", "r/a/b", "r/a/c", "r/a0", "r/aB", "r/ab", "r/b", "r2/a", "s"]
    assert keys == sorted(keys)
    for key in reversed(keys):
        store.put(key, key.encode())
    for prefix in ("", "r", "r/", "r/a", "r/a/", "r/a/b", "r/a.", "r/ab", "r2/", "nothing", "r/a/b/"):
        expected = [ObjectInfo(key, len(key)) for key in keys if key.startswith(prefix)]
        assert list(store.list(prefix)) == expected


HOSTILE = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../other",
    "run/../../other",
    "run/./manifest",
    "run//manifest",
    "run/manifest/",
    "run/.deltapost/tmp",
    ".deltapost/metadata/run",
    "run\\manifest",
    "run/mani\0fest",
    "run/manifest\n",
    "run/%2e%2e/manifest",
    "run/manifest?versionId=1",
    "rün/manifest",
    "run/" + "x" * 256,
    "/".join(["x" * 100] * 6),
]


def test_a_hostile_key_is_refused_by_every_verb(store: ObjectStore) -> None:
    for key in HOSTILE:
        for verb in (lambda k: store.put(k, b"x"), store.get, store.head, store.delete):
            with pytest.raises(StoreError, match="is not valid") as caught:
                verb(key)
            assert not isinstance(caught.value, ObjectMissing)
    assert list(store.list("")) == []


def test_a_hostile_prefix_lists_nothing_and_says_so_at_once(store: ObjectStore) -> None:
    for prefix in ("/", "..", "../", "run//", "run/../", "run\0", ".deltapost/"):
        with pytest.raises(StoreError, match="prefix"):
            store.list(prefix)


def test_the_probe_passes_and_leaves_nothing_behind(store: ObjectStore) -> None:
    probe(store, "probe")
    assert list(store.list("")) == []


def test_a_store_shows_where_it_is(store: ObjectStore) -> None:
    assert "://" in repr(store)


def test_an_object_is_read_in_pieces_up_to_a_length_and_told_its_size(store: ObjectStore) -> None:
    data = bytes(range(256)) * 12 * 1024  # three pieces
    store.put(KEY, data, metadata={"envelope": "first"})

    for length in (1, len(data) - 1, len(data), len(data) + 5):
        found: list[bytes] = []
        info = read(store, KEY, found.append, length=length)

        assert (info.key, info.size, info.metadata) == (KEY, len(data), {"envelope": "first"})
        assert b"".join(found) == data[:length]
        assert all(
            len(piece) <= max(PIECE_BYTES, length * (type(store).__name__ == "MemoryStore"))
            for piece in found
        )


def test_an_empty_and_a_missing_object_are_read_in_pieces_too(store: ObjectStore) -> None:
    store.put(KEY, b"")
    found: list[bytes] = []

    assert read(store, KEY, found.append, length=7).size == 0
    assert b"".join(found) == b""
    with pytest.raises(ObjectMissing):
        read(store, KEY + "0", found.append, length=7)


@pytest.mark.parametrize("size", [3, PIECE_BYTES + 1, 2 * PART_BYTES + 1])
def test_a_view_is_put_like_its_bytes(store: ObjectStore, tmp_path: Path, size: int) -> None:
    # Given a view of a mapped file
    array = allocate(tmp_path, size)
    array[:] = np.arange(size) % 251
    view = memoryview(array.data).toreadonly()

    # Then it is created once, is the same as its bytes, and conflicts with others
    assert store.put(KEY, view) is True
    assert store.put(KEY, view) is False
    assert store.put(KEY, bytes(view)) is False
    assert store.get(KEY).data == bytes(view)
    with pytest.raises(ObjectConflict):
        store.put(KEY, view[:-1])
