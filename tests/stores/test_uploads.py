"""What a put that was killed leaves behind is found and removed; what still goes on is left alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltapost.stores import ObjectStore, UploadsStore, open_store
from deltapost.stores.memory import MemoryStore
from fixtures.s3 import S3Server
from fixtures.served import eventually

PART_BYTES = 8 * 1024 * 1024

#: Puts an object of three parts and is killed once the second is written (S3), or half of the file.
KILLED = """
import os, signal, sys
from deltapost.stores import open_store

url, kind = sys.argv[1:3]
if kind == "s3":
    store = open_store(url, part_bytes=8 * 1024 * 1024)
    from deltapost.stores import s3
    client = s3.s3_client(store._settings)
    upload_part = client.upload_part
    def killed(**arguments):
        if arguments["PartNumber"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return upload_part(**arguments)
    client.upload_part = killed
else:
    store = open_store(url)
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
store.put("run/deltas/key", bytes(20 * 1024 * 1024))
"""

Kill = Callable[[], int]


@pytest.fixture(params=["directory", "moto", "seaweed"])
def killed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ObjectStore, Kill]:
    """A store, and what kills a process in the middle of a put into it and returns its exit status."""
    environment = dict(os.environ)
    if request.param == "directory":
        url = (tmp_path / "store").as_uri()
        store = open_store(url)
    else:
        server: S3Server = request.getfixturevalue(f"{request.param}_s3")
        url = f"s3://{server.bucket}/tests/{secrets.token_hex(8)}"
        store = open_store(url, **server.options, part_bytes=PART_BYTES)
        environment |= server.environment
    words = [sys.executable, "-c", KILLED, url, "directory" if request.param == "directory" else "s3"]
    return store, lambda: subprocess.run(words, env=environment, timeout=60).returncode


def unfinished(store: ObjectStore, prefix: str = "run/", idle_seconds: float = 0.0) -> list[str | None]:
    assert isinstance(store, UploadsStore)
    return [upload.key for upload in store.unfinished(prefix, idle_seconds=idle_seconds)]


def test_what_a_killed_put_left_is_listed_once_it_is_old_and_aborted(
    killed: tuple[ObjectStore, Kill],
) -> None:
    store, kill = killed
    assert unfinished(store) == []
    assert kill() == -signal.SIGKILL
    assert isinstance(store, UploadsStore)

    # Given that it is younger than asked for, it is not listed
    assert unfinished(store, idle_seconds=3600.0) == []
    # When it is old enough
    (upload,) = store.unfinished("run/", idle_seconds=0.0)
    assert upload.key in ("run/deltas/key", None)
    assert upload.idle_seconds < 60
    if upload.key is not None:
        assert unfinished(store, "other/") == []
    store.abort(upload)
    store.abort(upload)

    # Then nothing is left of it, and the key is free
    assert unfinished(store) == []
    assert list(store.list("")) == []
    assert store.put("run/deltas/key", b"bytes") is True


@pytest.mark.parametrize("server", ["moto", "seaweed"])
def test_an_upload_is_as_old_as_its_newest_part(request: pytest.FixtureRequest, server: str) -> None:
    """A slow upload that began long ago is alive as long as parts come."""
    s3: S3Server = request.getfixturevalue(f"{server}_s3")
    prefix = f"tests/{secrets.token_hex(8)}"
    store = open_store(f"s3://{s3.bucket}/{prefix}", **s3.options, part_bytes=PART_BYTES)
    assert isinstance(store, UploadsStore)
    client, target = s3.client(), {"Bucket": s3.bucket, "Key": f"{prefix}/run/slow"}
    upload_id = client.create_multipart_upload(**target)["UploadId"]
    assert unfinished(store) == ["run/slow"]
    eventually(lambda: unfinished(store, idle_seconds=3.0) == ["run/slow"])

    part = client.upload_part(**target, UploadId=upload_id, PartNumber=1, Body=bytes(PART_BYTES))

    assert unfinished(store, idle_seconds=3.0) == []
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(**target, UploadId=upload_id, MultipartUpload=parts)
    assert unfinished(store) == []
    assert store.head("run/slow").size == PART_BYTES


def test_a_put_whose_upload_was_aborted_under_it_starts_anew(seaweed_s3: S3Server) -> None:
    store = open_store(
        f"s3://{seaweed_s3.bucket}/tests/{secrets.token_hex(8)}", **seaweed_s3.options, part_bytes=PART_BYTES
    )
    assert isinstance(store, UploadsStore)
    from deltapost.stores import s3

    client = s3.s3_client(store._settings)  # type: ignore[attr-defined]
    upload_part, aborted = client.upload_part, []

    def aborting(**arguments: object) -> object:
        if not aborted:
            aborted.extend(store.unfinished("run/", idle_seconds=0.0))
            for upload in aborted:
                store.abort(upload)
        return upload_part(**arguments)

    client.upload_part = aborting
    try:
        assert store.put("run/large", bytes(PART_BYTES + 1)) is True
    finally:
        del client.upload_part
    assert [upload.key for upload in aborted] == ["run/large"]
    assert store.head("run/large").size == PART_BYTES + 1


def test_a_store_in_memory_leaves_nothing_behind() -> None:
    assert not isinstance(MemoryStore(), UploadsStore)
