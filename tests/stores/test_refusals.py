"""What a refusal means: that nothing is there as far as one may see, that a policy forbids it, or neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deltapost.errors import AccessDenied, NotReadable, StoreError, StoreUnavailable
from deltapost.stores import ObjectStore
from deltapost.stores.probe import probe
from fixtures.http_proxy import Exchange, Proxy

OpenS3 = Callable[..., ObjectStore]

on_moto = pytest.mark.parametrize("s3_server", ["moto"], indirect=True)


@pytest.fixture
def behind(proxy: Proxy, open_s3: OpenS3) -> ObjectStore:
    """A store that reaches its server through `proxy`."""
    return open_s3(endpoint=proxy.endpoint, attempts=2)


def refuse_what_is_missing(exchange: Exchange) -> None:
    """As S3 does where the right to list is missing."""
    if exchange.method in ("GET", "HEAD"):
        exchange.change_status = lambda status: 403 if status == 404 else status
        exchange.change_body = lambda body: body.replace(b"NoSuchKey", b"AccessDenied")


def test_what_is_missing_is_not_readable_where_listing_is_not_allowed(
    proxy: Proxy, behind: ObjectStore
) -> None:
    proxy.fault = refuse_what_is_missing
    behind.put("run/there", b"bytes")

    assert behind.get("run/there").data == b"bytes"
    for verb in (behind.get, behind.head):
        with pytest.raises(NotReadable, match="not there, or not allowed") as caught:
            verb("run/missing")
        assert caught.value.key == "run/missing"


@on_moto
def test_a_refused_write_is_denied_and_says_nothing_of_being_there(proxy: Proxy, behind: ObjectStore) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.status = 403

    proxy.fault = refuse
    with pytest.raises(AccessDenied, match="policy") as caught:
        behind.put("run/key", b"bytes")
    assert not isinstance(caught.value, NotReadable)


@on_moto
def test_a_write_that_another_holds_up_is_started_anew_where_listing_is_not_allowed(
    proxy: Proxy, behind: ObjectStore
) -> None:
    answers = iter([409])

    def held_up(exchange: Exchange) -> None:
        refuse_what_is_missing(exchange)
        if exchange.is_whole_put:
            exchange.status = next(answers, None)

    proxy.fault = held_up

    assert behind.put("run/key", b"bytes") is True


@on_moto
def test_a_taken_key_that_may_not_be_read_is_neither_written_nor_taken_for_ours(
    proxy: Proxy, behind: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltapost.stores.s3._WRITE_PAUSES", (0.0, 0.0))
    behind.put("run/key", b"theirs")

    def unreadable(exchange: Exchange) -> None:
        if exchange.method == "GET":
            exchange.status = 403

    proxy.fault = unreadable
    with pytest.raises(NotReadable, match="run/key"):
        behind.put("run/key", b"ours")


def test_the_probe_names_a_store_that_does_not_say_what_is_missing(proxy: Proxy, behind: ObjectStore) -> None:
    proxy.fault = refuse_what_is_missing
    with pytest.raises(StoreError, match="s3:ListBucket") as caught:
        probe(behind)
    assert repr(behind) in str(caught.value)
    assert not isinstance(caught.value, AccessDenied)


@on_moto
def test_a_server_without_the_newer_checksums_works_with_the_switch_and_names_it_without(
    proxy: Proxy, open_s3: OpenS3
) -> None:
    """As R2 and older MinIO did: 501 to what they do not know (user report 20)."""

    def not_implemented(exchange: Exchange) -> None:
        names = {name.lower() for name in exchange.headers}
        if names & {"x-amz-sdk-checksum-algorithm", "x-amz-trailer"} or any(
            name.startswith("x-amz-checksum-") for name in names
        ):
            exchange.status = 501

    proxy.fault = not_implemented
    with pytest.raises(StoreError, match="DELTAPOST_S3_CHECKSUMS=when_required"):
        open_s3(endpoint=proxy.endpoint, attempts=1).put("run/key", b"bytes")

    store = open_s3(endpoint=proxy.endpoint, attempts=1, checksums="when_required")
    assert store.put("run/key", b"bytes") is True
    probe(store)


@on_moto
@pytest.mark.parametrize("status", [304, 400])
def test_the_probe_passes_no_store_that_answers_the_condition_oddly(
    proxy: Proxy, behind: ObjectStore, status: int
) -> None:
    """Some older servers answer a refused condition with 304 (user report 22)."""
    puts = []

    def odd(exchange: Exchange) -> None:
        if exchange.is_whole_put:
            puts.append(exchange)
            if len(puts) == 2:
                exchange.status = status

    proxy.fault = odd
    with pytest.raises(StoreError) as caught:
        probe(behind)
    assert not isinstance(caught.value, StoreUnavailable)
    assert "probe/" in str(caught.value)
