"""What a directory adds to the suite: kills, full disks, links, and other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltapost.errors import AccessDenied, ObjectConflict, ObjectMissing, StoreError, StoreUnavailable
from deltapost.stores import Blob
from deltapost.stores.directory import DirectoryStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a directory"


def _run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout


def _temporary_files(root: Path) -> list[Path]:
    return list((root / ".deltapost" / "tmp").iterdir())


# A put is killed at its first touch of the file system, then at its second, and so on until it survives.
KILLED = """
import os, signal, sys
from deltapost.errors import ObjectMissing
from deltapost.stores.directory import DirectoryStore

data = bytes(range(256)) * 4096
seen = set()
for step in range(1_000):
    root = f"{sys.argv[1]}/{step}"
    DirectoryStore(root).put("run/other", b"other")
    child = os.fork()
    if child == 0:
        store, left = DirectoryStore(root), [step]
        def count(event, arguments):
            if event in ("open", "os.mkdir", "os.link", "os.remove", "os.scandir", "os.listdir"):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        store.put("run/deltas/key", data, metadata={"envelope": "e"})
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    store = DirectoryStore(root)
    listed = [each.key for each in store.list("")]
    try:
        found = store.get("run/deltas/key")
        assert found.data == data and dict(found.metadata) == {"envelope": "e"}, step
        assert listed == ["run/deltas/key", "run/other"], (step, listed)
        seen.add("whole")
    except ObjectMissing:
        assert listed == ["run/other"], (step, listed)
        seen.add("absent")
    assert store.put("run/deltas/key", data, metadata={"envelope": "e"}) == (len(listed) == 1), step
    assert store.get("run/deltas/key").data == data
    assert store.head("run/deltas/key").metadata == {"envelope": "e"}
    if not killed:
        break
print(step, sorted(seen))
"""


def test_a_put_that_is_killed_at_any_step_leaves_a_whole_object_or_none(root: Path) -> None:
    steps, _, seen = _run(KILLED, root).partition(" ")
    assert int(steps) >= 6
    assert seen.strip() == "['absent', 'whole']"


def test_a_put_that_is_killed_while_it_writes_leaves_nothing(root: Path) -> None:
    writer = "import sys; from deltapost.stores.directory import DirectoryStore as D\n"
    writer += "print('ready', flush=True); D(sys.argv[1]).put('run/key', bytes(300_000_000))"
    process = subprocess.Popen([sys.executable, "-c", writer, str(root)], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (root / ".deltapost/tmp").exists() or not _temporary_files(root):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()
    store = DirectoryStore(root)
    assert list(store.list("")) == []
    assert store.put("run/key", b"small") is True


def test_only_temporary_files_older_than_an_hour_are_removed_at_opening(root: Path) -> None:
    DirectoryStore(root)
    old, young = (root / ".deltapost" / "tmp" / name for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3_700, time.time() - 3_700))
    store = DirectoryStore(root)
    assert _temporary_files(root) == [young]
    assert list(store.list("")) == []


FULL = """
import resource, signal, sys
from deltapost.errors import ObjectMissing, StoreUnavailable
from deltapost.stores.directory import DirectoryStore

store = DirectoryStore(sys.argv[1])
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
try:
    store.put("run/key", bytes(1_000_000))
except StoreUnavailable as error:
    assert error.retryable and sys.argv[1] in error.hint, error
else:
    raise SystemExit("the put went through")
assert store.put("run/small", b"fits") is True
assert [each.key for each in store.list("")] == ["run/small"]
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert store.put("run/key", bytes(1_000_000)) is True
"""


def test_a_disk_that_takes_no_more_is_unavailable_and_goes_on_once_there_is_room(root: Path) -> None:
    _run(FULL, root)
    assert _temporary_files(root) == []


def test_a_directory_that_may_not_be_written_is_denied_with_its_path() -> None:
    # Not even root may create directories in these.
    place = "/sys/deltapost" if sys.platform == "linux" else "/System/deltapost"
    with pytest.raises(AccessDenied, match=place):
        DirectoryStore(place)


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        DirectoryStore(tmp_path / "file")


def test_a_key_does_not_follow_a_link_out_of_the_directory(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = DirectoryStore(root)
    (root / "run").symlink_to(outside)
    (root / "other").mkdir()
    (root / "other" / "key").symlink_to(outside / "secret")
    for verb in (lambda k: store.put(k, b"x"), store.get, store.head, store.delete):
        for key in ("run/secret", "run/new", "other/key"):
            with pytest.raises(StoreError, match="symbolic link"):
                verb(key)
    assert list(store.list("")) == []
    assert list(store.list("run/")) == []
    assert sorted(each.name for each in outside.iterdir()) == ["secret"]


def test_a_root_that_is_a_link_itself_is_the_operators_choice(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    assert DirectoryStore(tmp_path / "link").put("run/key", b"x") is True
    assert DirectoryStore(root).get("run/key").data == b"x"


def test_a_key_below_another_keys_object_is_refused(root: Path) -> None:
    store = DirectoryStore(root)
    store.put("run/key", b"x")
    with pytest.raises(StoreError):
        store.put("run/key/below", b"y")
    with pytest.raises(ObjectMissing):
        store.get("run/key/below")
    store.delete("run/key/below")
    with pytest.raises(ObjectConflict, match="run"):
        store.put("run", b"z")
    store.delete("run")
    assert [each.key for each in store.list("")] == ["run/key"]


def test_what_was_put_is_there_when_the_directory_is_opened_again(root: Path) -> None:
    DirectoryStore(root).put("run/key", b"bytes", metadata={"envelope": "e"})
    assert DirectoryStore(root).get("run/key") == Blob(b"bytes", 5, {"envelope": "e"})
    assert (root / "run" / "key").read_bytes() == b"bytes"


RACING = """
import sys
from deltapost.errors import ObjectConflict
from deltapost.stores.directory import DirectoryStore

store, wins = DirectoryStore(sys.argv[1]), 0
sys.stdin.readline()
for number in range(100):
    try:
        wins += store.put(f"run/{number}", sys.argv[2].encode())
    except ObjectConflict:
        pass
print(wins)
"""


def test_of_processes_that_race_exactly_one_wins_each_key(root: Path) -> None:
    command = [sys.executable, "-c", RACING, str(root)]
    racers = [
        subprocess.Popen([*command, f"racer {n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for n in range(3)
    ]
    wins = [int(racer.communicate(b"go\n", timeout=60)[0]) for racer in racers]
    assert sum(wins) == 100
    store = DirectoryStore(root)
    winners = [store.get(each.key).data for each in store.list("run/")]
    assert [winners.count(b"racer %d" % n) for n in range(3)] == wins


@pytest.mark.parametrize("instead", [False, True], ids=["gone", "an empty directory in its place"])
def test_a_directory_that_vanished_under_an_open_store_is_no_definite_answer(
    tmp_path: Path, instead: bool
) -> None:
    # Given an open store whose disk is unmounted
    root = tmp_path / "bucket"
    store = DirectoryStore(root)
    store.put("run/manifest", b"bytes")
    root.rename(tmp_path / "elsewhere")
    if instead:
        root.mkdir()

    # Then nothing is said to be missing, and nothing is written beside it
    for call in (
        lambda: store.get("run/manifest"),
        lambda: store.head("run/manifest"),
        lambda: list(store.list("run/")),
        lambda: store.put("run/other", b"bytes"),
    ):
        with pytest.raises(StoreUnavailable, match="is gone"):
            call()

    # And all is there again once the disk is back
    if instead:
        root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    assert store.get("run/manifest").data == b"bytes"
    assert store.put("run/other", b"bytes")
