"""What S3 adds to the suite: lost replies, failing servers, parts, checksums, processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltapost.errors import AccessDenied, ObjectConflict, ObjectMissing, StoreError, StoreUnavailable
from deltapost.stores import ObjectStore, open_store
from deltapost.stores.probe import probe
from fixtures.http_proxy import Exchange, Proxy
from fixtures.ports import free_ports
from fixtures.s3 import S3Server

PART_BYTES = 8 * 1024 * 1024
LARGE = bytes(range(256)) * (3 * PART_BYTES // 256) + b"!"
OpenS3 = Callable[..., ObjectStore]


#: For what does not depend on the server, or is a lie that a server which checks signatures would notice.
on_moto = pytest.mark.parametrize("s3_server", ["moto"], indirect=True)


@pytest.fixture
def behind(proxy: Proxy, open_s3: OpenS3) -> ObjectStore:
    """A store that reaches its server through `proxy`."""
    return open_s3(endpoint=proxy.endpoint, attempts=3)


def _lose_reply(exchange: Exchange) -> None:
    exchange.lose_reply = True


def _answer(status: int) -> Callable[[Exchange], None]:
    def change(exchange: Exchange) -> None:
        exchange.status = status

    return change


def _without_header(name: str) -> Callable[[Exchange], None]:
    def change(exchange: Exchange) -> None:
        exchange.headers = {key: value for key, value in exchange.headers.items() if key.lower() != name}

    return change


def test_a_put_whose_reply_was_lost_succeeds_though_its_repetition_is_refused(
    proxy: Proxy, behind: ObjectStore, open_s3: OpenS3
) -> None:
    proxy.on_first(lambda e: e.is_whole_put, _lose_reply)
    assert behind.put("run/key", b"bytes") is False
    assert sum(e.is_whole_put for e in proxy.exchanges) == 2
    assert open_s3().get("run/key").data == b"bytes"


def test_a_completed_upload_whose_reply_was_lost_succeeds_too(
    proxy: Proxy, behind: ObjectStore, open_s3: OpenS3
) -> None:
    proxy.on_first(lambda e: e.is_completion, _lose_reply)
    assert behind.put("run/key", LARGE) in (True, False)
    assert sum(e.is_completion for e in proxy.exchanges) == 2
    assert open_s3().get("run/key").data == LARGE


def test_other_bytes_written_while_the_reply_was_lost_are_a_conflict(
    proxy: Proxy, behind: ObjectStore, open_s3: OpenS3
) -> None:
    def overtaken(exchange: Exchange) -> None:
        open_s3().put("run/key", b"other")
        exchange.lose_reply = True

    proxy.on_first(lambda e: e.is_whole_put, overtaken)
    with pytest.raises(ObjectConflict, match="run/key"):
        behind.put("run/key", b"bytes")


@on_moto
def test_a_write_refused_because_another_is_under_way_is_started_anew(
    proxy: Proxy, behind: ObjectStore
) -> None:
    proxy.on_first(lambda e: e.is_whole_put, _answer(409))
    assert behind.put("run/key", b"bytes") is True
    assert behind.get("run/key").data == b"bytes"


def test_parts_are_equal_but_for_the_last_and_the_condition_is_on_the_completion(
    proxy: Proxy, behind: ObjectStore
) -> None:
    behind.put("run/key", LARGE)
    parts = [len(e.body) for e in proxy.exchanges if "partNumber=" in e.path]
    assert parts == [PART_BYTES, PART_BYTES, PART_BYTES, 1]
    conditions = [e for e in proxy.exchanges if e.headers.get("If-None-Match") == "*"]
    assert [e.is_completion for e in conditions] == [True]


@on_moto
def test_an_object_of_exactly_one_part_is_put_in_one_piece(proxy: Proxy, behind: ObjectStore) -> None:
    behind.put("run/key", LARGE[:PART_BYTES])
    assert [e.is_whole_put for e in proxy.exchanges] == [True]


def test_parts_of_an_upload_that_failed_are_aborted(
    s3_server: S3Server, proxy: Proxy, open_s3: OpenS3
) -> None:
    store = open_s3(endpoint=proxy.endpoint, attempts=1)
    proxy.on_first(lambda e: "partNumber=2" in e.path, _answer(500))
    with pytest.raises(StoreUnavailable):
        store.put("run/key", LARGE)
    assert s3_server.client().list_multipart_uploads(Bucket=s3_server.bucket).get("Uploads", []) == []
    with pytest.raises(ObjectMissing):
        store.head("run/key")


@on_moto
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_fails_is_unavailable_after_the_attempts_and_serves_later(
    proxy: Proxy, behind: ObjectStore, status: int
) -> None:
    proxy.fault = _answer(status)
    with pytest.raises(StoreUnavailable, match=str(status)) as caught:
        behind.get("run/key")
    assert caught.value.retryable
    assert len(proxy.exchanges) == 3
    proxy.fault = lambda exchange: None
    assert behind.put("run/key", b"bytes") is True


@on_moto
def test_a_single_failure_is_not_seen(proxy: Proxy, behind: ObjectStore) -> None:
    proxy.on_first(lambda e: e.is_whole_put, _answer(503))
    assert behind.put("run/key", b"bytes") is True


@on_moto
def test_a_reply_that_breaks_off_is_unavailable_and_not_short_data(proxy: Proxy, behind: ObjectStore) -> None:
    behind.put("run/key", b"0123456789")

    def cut(exchange: Exchange) -> None:
        exchange.cut_reply = exchange.method == "GET"

    proxy.fault = cut
    for options in ({}, {"offset": 2}, {"length": 6}):
        with pytest.raises(StoreUnavailable):
            behind.get("run/key", **options)


@on_moto
def test_a_refused_connection_is_unavailable_at_once(open_s3: OpenS3) -> None:
    started = time.monotonic()
    store = open_s3(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}", attempts=1)
    with pytest.raises(StoreUnavailable):
        store.head("run/key")
    assert time.monotonic() - started < 5


@on_moto
def test_a_server_that_says_nothing_is_unavailable_when_the_time_is_up(open_s3: OpenS3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = open_s3(endpoint=endpoint, attempts=1, read_seconds=0.2)
        with pytest.raises(StoreUnavailable):
            store.get("run/key")


@on_moto
def test_ranges_hold_on_a_server_that_ignores_them(proxy: Proxy, behind: ObjectStore) -> None:
    behind.put("run/key", b"0123456789")
    proxy.fault = _without_header("range")
    assert behind.get("run/key", offset=3, length=4).data == b"3456"
    assert behind.get("run/key", offset=8).data == b"89"
    assert behind.get("run/key", offset=99, length=4).data == b""
    assert behind.get("run/key", length=3).size == 10


def test_an_oversized_object_is_read_no_further_than_asked(proxy: Proxy, behind: ObjectStore) -> None:
    behind.put("run/key", LARGE)
    sizes: list[int] = []

    def measure(data: bytes) -> bytes:
        sizes.append(len(data))
        return data

    def watch(exchange: Exchange) -> None:
        exchange.change_body = measure

    proxy.fault = watch
    blob = behind.get("run/key", length=1_001)
    assert (len(blob.data), blob.size, sizes) == (1_001, len(LARGE), [1_001])


@on_moto
def test_the_probe_names_a_store_that_ignores_the_condition(proxy: Proxy, behind: ObjectStore) -> None:
    proxy.fault = _without_header("if-none-match")
    with pytest.raises(StoreError, match="ignores 'If-None-Match") as caught:
        probe(behind)
    assert repr(behind) in str(caught.value)


@on_moto
def test_the_probe_names_a_store_that_writes_something_else(proxy: Proxy, open_s3: OpenS3) -> None:
    store = open_s3(endpoint=proxy.endpoint, checksums="when_required")

    def trailer(exchange: Exchange) -> None:
        if exchange.method == "GET":
            exchange.change_body = lambda data: data + b"\r\nx-amz-checksum-crc32:AAAAAA=="

    proxy.fault = trailer
    with pytest.raises(StoreError, match="other bytes") as caught:
        probe(store)
    assert "when_required" in str(caught.value)


@pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
def test_bytes_are_equal_whichever_way_the_checksum_switch_stands(
    proxy: Proxy, open_s3: OpenS3, s3_server: S3Server, checksums: str
) -> None:
    store = open_s3(endpoint=proxy.endpoint, checksums=checksums)
    for key, data in (("run/small", b"bytes"), ("run/large", LARGE)):
        store.put(key, data)
        raw = s3_server.client().get_object(Bucket=s3_server.bucket, Key=_full_key(store, key))
        assert raw["Body"].read() == data
    sent = [name.lower() for e in proxy.exchanges for name in e.headers]
    assert any(name.startswith("x-amz-checksum-crc32") for name in sent) == (checksums == "when_supported")


def _full_key(store: ObjectStore, key: str) -> str:
    return f"{repr(store).partition('s3://deltapost/')[2].rstrip(')')}{key}"


def test_a_bucket_that_is_not_there_is_named_with_what_to_do(s3_server: S3Server) -> None:
    store = open_store("s3://no-such-bucket/prefix", **s3_server.options)
    for verb in (
        lambda: store.put("run/key", b""),
        lambda: store.get("run/key"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match="create the bucket") as caught:
            verb()
        assert not isinstance(caught.value, ObjectMissing)
        assert "no-such-bucket" in str(caught.value)


def test_wrong_credentials_are_denied_and_never_shown(seaweed_s3: S3Server) -> None:
    secret = "another-secret-0123456789"
    options = {**seaweed_s3.options, "secret_access_key": secret}
    store = open_store(f"s3://{seaweed_s3.bucket}/prefix", **options)
    with pytest.raises(AccessDenied, match="credentials") as caught:
        store.get("run/key")
    assert secret not in f"{caught.value!r} {caught.value} {caught.value.__cause__} {store!r} {vars(store)}"


@on_moto
def test_a_refusal_says_that_the_object_may_also_not_be_there(proxy: Proxy, behind: ObjectStore) -> None:
    proxy.fault = _answer(403)
    for verb in (behind.get, behind.head):
        with pytest.raises(AccessDenied, match="not there, or not allowed"):
            verb("run/key")


def test_prefixes_of_one_bucket_do_not_see_each_other(s3_server: S3Server) -> None:
    stores = [
        open_store(f"s3://{s3_server.bucket}/shared{suffix}", **s3_server.options) for suffix in ("", "-2")
    ]
    for number, store in enumerate(stores):
        assert store.put("run/key", b"%d" % number) is True
    assert [[each.key for each in store.list("")] for store in stores] == [["run/key"], ["run/key"]]
    assert [store.get("run/key").data for store in stores] == [b"0", b"1"]


def test_a_listing_goes_on_past_a_page(
    moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch, proxies: Callable[[S3Server], Proxy]
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "5")
    proxy = proxies(moto_s3)
    store = open_store(f"s3://{moto_s3.bucket}/paged", **{**moto_s3.options, "endpoint": proxy.endpoint})
    keys = [f"run/records/0000/{number:010d}" for number in range(12)]
    for key in keys:
        store.put(key, b"x")
    proxy.reset()
    assert [each.key for each in store.list("run/records/")] == keys
    assert len(proxy.exchanges) == 3


@pytest.mark.slow
def test_a_listing_goes_on_past_a_page_of_a_thousand(s3_server: S3Server, open_s3: OpenS3) -> None:
    store = open_s3()
    keys = [f"run/records/0000/{number:010d}" for number in range(1_005)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    assert [each.key for each in store.list("run/records/")] == keys


FORKING = """
import os, sys
from deltapost.stores import open_store

store = open_store(sys.argv[1])
store.put("run/before", b"before")
child = os.fork()
who = b"child" if child == 0 else b"parent"
for number in range(40):
    key = f"run/{who.decode()}/{number}"
    store.put(key, who * number)
    assert store.get(key).data == who * number, key
    assert store.get("run/before").data == b"before"
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_store_carried_over_a_fork_serves_both_processes(seaweed_s3: S3Server, tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    subprocess.run(
        [sys.executable, str(script), f"s3://{seaweed_s3.bucket}/forked"],
        env=seaweed_s3.environment,
        check=True,
        timeout=60,
    )
