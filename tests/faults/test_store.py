"""A store that fails, is slow, hangs up or loses replies delays a round and changes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
from _pytest.mark import ParameterSet

from deltapost.errors import StoreUnavailable
from deltapost.ledger.engine import open_ledger
from deltapost.stores import open_store
from fixtures.history import check_whole, history
from fixtures.http_proxy import Exchange, Proxy, http_proxy
from fixtures.pipeline import Pipeline
from fixtures.playing import Undisturbed
from fixtures.s3 import S3Server
from fixtures.scripts import PLAIN, ROUNDS, new_pipeline, post
from fixtures.served import Served
from fixtures.training import training


def status(code: int) -> Callable[[Exchange], None]:
    def change(exchange: Exchange) -> None:
        exchange.status = code

    return change


def hang_up(exchange: Exchange) -> None:
    exchange.hang_up = True


def lose_reply(exchange: Exchange) -> None:
    exchange.lose_reply = True


def slow(exchange: Exchange) -> None:
    exchange.delay_seconds = 0.3


FAULTS: dict[str, Callable[[Exchange], None]] = {
    "500": status(500),
    "503": status(503),
    "409": status(409),
    "hangs-up": hang_up,
    "loses-replies": lose_reply,
    "is-slow": slow,
}
CALLS = (
    ("GET", "deltas"), ("GET", "anchors"), ("GET", "records"), ("GET", "attestations"),
    ("PUT", "anchors"), ("PUT", "outer"), ("PUT", "updates"), ("PUT", "records"), ("PUT", "attestations"),
)  # fmt: skip
SAMPLED = {("500", "PUT", "records"), ("loses-replies", "PUT", "attestations")}


def matrix() -> list[ParameterSet]:
    return [
        pytest.param(
            fault,
            method,
            area,
            id=f"{fault}-{method}-{area}",
            marks=[] if (fault, method, area) in SAMPLED else [pytest.mark.slow],
        )
        for fault in FAULTS
        for method, area in CALLS
        if fault != "409" or method == "PUT"
    ]


@pytest.fixture(scope="module")
def seaweed_proxy(seaweed_s3: S3Server) -> Iterator[Proxy]:
    with http_proxy(seaweed_s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def pipeline(seaweed_s3: S3Server, seaweed_proxy: Proxy, migrated_sqlite_url: str) -> Iterator[Pipeline]:
    """Over SeaweedFS behind the proxy, every call tried once."""
    seaweed_proxy.reset()
    options = {**seaweed_s3.options, "endpoint": seaweed_proxy.endpoint, "attempts": 1}
    store = open_store(f"s3://{seaweed_s3.bucket}/faults/{secrets.token_hex(8)}", **options)
    ledger = open_ledger(migrated_sqlite_url)
    yield new_pipeline(PLAIN, ledger, store)
    ledger.close()


#: Calls that fail before the store recovers.
LASTS = 3


@pytest.mark.parametrize(("fault", "method", "area"), matrix())
def test_a_store_that_fails_at_a_kind_of_call_changes_no_record_and_no_row(
    pipeline: Pipeline,
    seaweed_proxy: Proxy,
    undisturbed: Undisturbed,
    fault: str,
    method: str,
    area: str,
) -> None:
    hit = 0

    def change(exchange: Exchange) -> None:
        nonlocal hit
        hit += 1
        if hit <= LASTS:
            FAULTS[fault](exchange)

    worker = pipeline.worker(payload_cache_bytes=0)
    failures = 0
    for version in range(ROUNDS):
        post(pipeline, version, unreadable=True)
        if version == 1:  # a worker that has to read the anchor back
            worker = pipeline.worker(payload_cache_bytes=0)
            seaweed_proxy.on_each(lambda exchange: exchange.touches(method, area), change)
        for _ in range(60):
            if pipeline.head() > version:
                break
            try:
                worker.step()
            except StoreUnavailable:
                failures += 1
                pipeline.clock.sleep(1.0)
    pipeline.settle(worker)

    assert hit > 0
    # A 409 and a lost reply to a PUT are answered by reading back, in the call itself.
    assert failures == 0 if fault == "is-slow" else failures > 0 or method == "PUT"
    assert history(pipeline) == undisturbed(PLAIN, False)
    check_whole(pipeline)


@pytest.mark.parametrize(
    "fault", [pytest.param("503", marks=pytest.mark.slow), pytest.param("hangs-up", id="stopped")]
)
def test_a_store_that_serves_nobody_for_a_while_shows_in_readiness_and_is_waited_out(
    seaweed_s3: S3Server, seaweed_proxy: Proxy, parts: Served, fault: str
) -> None:
    seaweed_proxy.reset()
    options = {**seaweed_s3.options, "endpoint": seaweed_proxy.endpoint, "attempts": 1}
    parts.store = open_store(f"s3://{seaweed_s3.bucket}/faults/{secrets.token_hex(8)}", **options)  # type: ignore[assignment]

    with training(parts) as trained:
        trained.survives(
            lambda: seaweed_proxy.on_each(lambda exchange: True, FAULTS[fault]),
            seaweed_proxy.reset,
            "run tiny fragment 0",
        )
