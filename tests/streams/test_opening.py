"""URLs and positions: what opens a log, and errors that never repeat a password."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltapost.errors import ConfigurationError
from deltapost.streams import START, open_log, position_key
from deltapost.streams.positions import check_position, following, preceding
from deltapost.streams.urls import parse_redis_url

ids = st.builds(lambda ms, seq: f"{ms}-{seq}", st.integers(0, 2**64 - 2), st.integers(0, 2**64 - 1))


def test_a_memory_url_names_one_log_per_process() -> None:
    open_log("memory://opening-a").append("s", b"x")
    assert open_log("memory://opening-a").length("s") == 1
    assert open_log("memory://opening-b").length("s") == 0


@pytest.mark.parametrize(
    ("url", "shown", "options"),
    [
        ("redis://127.0.0.1", "redis://127.0.0.1:6379/0", {"db": 0}),
        ("redis://user:secret@host:7000/3", "redis://host:7000/3", {"db": 3}),
        ("redis://[::1]:7000", "redis://[::1]:7000/0", {"db": 0}),
        (
            "rediss://:secret@host/1?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=no",
            "rediss://host:6379/1",
            {"db": 1, "ssl_ca_certs": "/etc/ca.pem", "ssl_check_hostname": False},
        ),
        ("unix:///run/valkey.sock?db=2", "unix:///run/valkey.sock", {"db": 2}),
        ("unix://user:secret@/run/valkey.sock", "unix:///run/valkey.sock", {"db": 0}),
        (
            "redis+sentinel://user:secret@a:1,b/posts/2?socket_timeout=3",
            "redis+sentinel://a:1,b:26379/posts/2",
            {"db": 2, "socket_timeout": 3.0},
        ),
    ],
)
def test_a_url_is_read_whole_and_shown_without_its_secrets(
    url: str, shown: str, options: dict[str, object]
) -> None:
    address = parse_redis_url(url)
    assert str(address) == shown
    assert address.options == options
    assert (address.password == "secret") == ("secret" in url)
    assert "secret" not in repr(address)
    assert "secret" not in repr(open_log(url))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:secret@host",
        "memory://",
        "memory://a/b",
        "redis://",
        "redis://:secret@",
        "redis://:secret@host:port",
        "redis://:secret@host:99999",
        "redis://:secret@host/zero",
        "redis://:secret@host/0/1",
        "redis://:secret@host/0?db=1",
        "redis://:secret@a,b/0",
        "redis://:secret@host?ssl_ca_certs=/etc/ca.pem",
        "redis://:secret@host?password=secret",
        "redis://:secret@host?socket_timeout=secret",
        "rediss://:secret@host?ssl_check_hostname=secret",
        "unix://",
        "unix://secret",
        "unix://host/secret",
        "redis+sentinel://:secret@host",
        "redis+sentinel://:secret@host,,other/posts",
        "redis+sentinel://:secret@host/posts/0/1",
    ],
)
def test_a_url_that_names_no_log_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_log(url)
    assert caught.value.hint
    assert "secret" not in f"{caught.value} {caught.value!r}"
    assert caught.value.__cause__ is None


def test_ten_comes_after_nine() -> None:
    assert position_key("5-10") > position_key("5-9")
    assert position_key("10-0") > position_key("9-99")


@given(ids)
def test_what_follows_an_id_is_preceded_by_it(entry_id: str) -> None:
    assert preceding(following(entry_id)) == entry_id
    assert position_key(following(entry_id)) > position_key(entry_id)
    assert check_position(following(entry_id)) == following(entry_id)


def test_nothing_precedes_the_start() -> None:
    assert preceding(START) == START
