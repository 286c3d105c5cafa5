"""Logs for the conformance suite: each test gets one that is empty, and a way to make it forget."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
import redis

from deltapost.streams import MessageLog, open_log
from deltapost.streams.memory import MemoryLog


@pytest.fixture(params=["memory", "valkey"])
def log(request: pytest.FixtureRequest) -> Iterator[MessageLog]:
    if request.param == "memory":
        opened = open_log(f"memory://{secrets.token_hex(8)}")
    else:
        opened = open_log(request.getfixturevalue("valkey_url"))
    yield opened
    opened.close()


@pytest.fixture
def server(valkey_url: str) -> Iterator[redis.Redis]:
    """Valkey past our own code, as somebody else would use it."""
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def forget(log: MessageLog, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Makes the log lose everything, as FLUSHALL does."""
    if isinstance(log, MemoryLog):

        def forget_memory() -> None:
            log._streams.clear()
            log._epochs.clear()

        return forget_memory
    client: redis.Redis = request.getfixturevalue("server")
    return lambda: client.flushall() and None
