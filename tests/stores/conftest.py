"""Stores for the conformance suite: each test gets one that is empty."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltapost.stores import ObjectStore, open_store
from fixtures.http_proxy import Proxy, http_proxy
from fixtures.s3 import S3Server

#: The smallest part that S3 allows, so that a test needs no large object to see several.
PART_BYTES = 8 * 1024 * 1024

OpenS3 = Callable[..., ObjectStore]


@pytest.fixture(params=["moto", "seaweed"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    server: S3Server = request.getfixturevalue(f"{request.param}_s3")
    return server


@pytest.fixture(scope="session")
def proxies() -> Iterator[Callable[[S3Server], Proxy]]:
    """One proxy per server for the whole session, so that its endpoint's client is made once."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Proxy] = {}

        def proxy_of(server: S3Server) -> Proxy:
            if server.name not in running:
                running[server.name] = stack.enter_context(http_proxy(server.endpoint))
            running[server.name].reset()
            return running[server.name]

        yield proxy_of


@pytest.fixture
def proxy(s3_server: S3Server, proxies: Callable[[S3Server], Proxy]) -> Proxy:
    """Before `s3_server`, without faults so far."""
    return proxies(s3_server)


@pytest.fixture
def open_s3(s3_server: S3Server) -> OpenS3:
    """Opens a store below a fresh prefix of the server's bucket; options win over the server's."""
    prefix = f"tests/{secrets.token_hex(8)}"

    def opener(**options: object) -> ObjectStore:
        return open_store(
            f"s3://{s3_server.bucket}/{prefix}", **{**s3_server.options, "part_bytes": PART_BYTES, **options}
        )

    return opener


@pytest.fixture(params=["memory", "directory", "moto", "seaweed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    fresh = secrets.token_hex(8)
    if request.param == "memory":
        return open_store(f"memory://{fresh}")
    if request.param == "directory":
        return open_store((tmp_path / "store").as_uri())
    server: S3Server = request.getfixturevalue(f"{request.param}_s3")
    return open_store(f"s3://{server.bucket}/tests/{fresh}", **server.options, part_bytes=PART_BYTES)
