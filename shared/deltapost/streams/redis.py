"""Streams in Redis or Valkey, 7 or newer: whatever keeps the server from answering is StreamUnavailable.

An entry has one field, `m`, with the message's bytes. redis-py's own retries are off: every call is sent
once, its failure is the caller's to retry, and all callers have a back-off. So an `append` that fails may
have landed, and the one that repeats it lands a second time; nothing lands twice behind anybody's back.

`Bounds.removed_through` is exact after `trim`. When somebody else removed entries (XTRIM, XADD MAXLEN, XDEL),
Redis does not say which, and it is the highest id that may be gone: just below the first entry.

Failure modes. Lost or refused connections, time-outs, a server that loads, is read-only, is out of memory or
disk, or has no master: StreamUnavailable. Refused credentials or a missing permission: StreamDenied. A key
of another type: StreamError. A blocking read never outlives the socket's time-out. `docker/rights/redis.acl`
lists the commands that each role needs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from deltapost.errors import StreamDenied, StreamError, StreamUnavailable
from deltapost.serialization.names import epoch_key
from deltapost.streams import Bounds, Entry, position_key
from deltapost.streams.positions import check_position, following, preceding
from deltapost.streams.scripts import REPLACE_EPOCH, TRIM
from deltapost.streams.urls import RedisAddress, parse_redis_url

_FIELD: Final = b"m"

#: Seconds until a connection is given up, and until a reply is; a blocking read takes half of that.
_CONNECT_SECONDS: Final = 5.0
_REPLY_SECONDS: Final = 10.0

#: Seconds after which an idle connection is tried with PING first: NAT tables forget after minutes.
_HEALTH_CHECK_SECONDS: Final = 30

#: What a server that cannot serve now and may later replies: redis-py has classes for some first words.
_TRANSIENT_WORDS: Final = ("BUSY", "FAILOVER", "MISCONF", "NOREPLICAS", "UNKILLABLE")
_TRANSIENT: Final = (ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)


class RedisLog:
    """A MessageLog in the Redis server, or the Sentinel-watched service, that `url` names."""

    def __init__(self, url: str) -> None:
        address = parse_redis_url(url)
        self._shown = str(address)
        options = {
            "socket_connect_timeout": _CONNECT_SECONDS,
            "socket_timeout": _REPLY_SECONDS,
            "socket_keepalive": True,
            "health_check_interval": _HEALTH_CHECK_SECONDS,
            **address.options,
        }
        if address.path is not None:
            del options["socket_keepalive"]
        self._block_seconds = options["socket_timeout"] / 2
        self._client = _connect(address, options)
        self._trim = self._client.register_script(TRIM)
        self._replace_epoch = self._client.register_script(REPLACE_EPOCH)

    def __repr__(self) -> str:
        return f"RedisLog({self._shown})"

    def append(self, stream: str, data: bytes, *, max_length: int | None = None) -> str:
        with self._reported("XADD", stream):
            entry_id: bytes = self._client.xadd(stream, {_FIELD: data}, maxlen=max_length, approximate=True)
            return entry_id.decode()

    def read(self, stream: str, after: str, *, limit: int, wait_seconds: float = 0.0) -> list[Entry]:
        reply = self._read({stream: after}, stream, limit, wait_seconds)
        return [_entry(*item) for item in reply[0][1]] if reply else []

    def ready(self, positions: Mapping[str, str], *, wait_seconds: float = 0.0) -> set[str]:
        if not positions:  # XREAD of no stream is an error
            time.sleep(max(wait_seconds, 0.0))
            return set()
        reply = self._read(positions, f"{len(positions)} streams", 1, wait_seconds)
        return {name.decode() for name, _ in reply}

    def _read(self, positions: Mapping[str, str], what: str, limit: int, wait_seconds: float) -> list[Any]:
        """XREAD's reply: for each stream that has some, its name and the entries."""
        streams: dict[Any, Any] = {name: check_position(after) for name, after in positions.items()}
        deadline = time.monotonic() + wait_seconds
        while True:
            remaining = min(deadline - time.monotonic(), self._block_seconds)
            # BLOCK 0 would wait for ever.
            block = max(1, int(remaining * 1000)) if remaining > 0 else None
            with self._reported("XREAD", what):
                reply: list[Any] = self._client.xread(streams, count=limit, block=block)
            if reply or time.monotonic() >= deadline:
                return reply

    def bounds(self, stream: str) -> Bounds | None:
        with self._reported("XINFO", stream):
            try:
                facts: dict[str, Any] = self._client.xinfo_stream(stream)
            except ResponseError as error:
                if "no such key" in str(error):
                    return None
                raise
        if "max-deleted-entry-id" not in facts:
            raise StreamError(
                f"{self._shown} is too old for {stream!r}", hint="use Redis 7 or Valkey 7.2 or newer"
            )
        return _bounds(facts)

    def length(self, stream: str) -> int:
        with self._reported("XLEN", stream):
            length: int = self._client.xlen(stream)
            return length

    def trim(self, stream: str, through: str) -> int:
        following_id = following(check_position(through))
        with self._reported("XTRIM", stream):
            removed: int = self._trim(keys=[stream], args=[through, following_id])
            return removed

    def epoch(self, stream: str) -> str | None:
        with self._reported("GET", epoch_key(stream)):
            name: bytes | None = self._client.get(epoch_key(stream))
            return None if name is None else name.decode(errors="surrogateescape")

    def claim_epoch(self, stream: str, proposed: str) -> str:
        with self._reported("SET", epoch_key(stream)):
            name: bytes | None = self._client.set(epoch_key(stream), proposed, nx=True, get=True)
            return proposed if name is None else name.decode(errors="surrogateescape")

    def replace_epoch(self, stream: str, *, old: str, new: str) -> str:
        with self._reported("EVAL", epoch_key(stream)):
            name: bytes = self._replace_epoch(
                keys=[epoch_key(stream)], args=[old.encode(errors="surrogateescape"), new]
            )
            return name.decode(errors="surrogateescape")

    def ping(self) -> None:
        with self._reported("PING", "the server"):
            self._client.ping()

    def eviction_policy(self) -> str | None:
        """What the server does when its memory is full; None when it does not say. Needs INFO in an ACL."""
        with self._reported("INFO", "memory"):
            policy: str | None = self._client.info("memory").get("maxmemory_policy")
            return policy

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _reported(self, verb: str, what: str) -> Iterator[None]:
        """Turns redis-py's errors into the error tree's."""
        try:
            yield
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise StreamDenied(
                f"{self._shown} refused {verb} of {what!r}: {type(error).__name__}",
                hint="check the user, its password and its ACL",
            ) from error
        except ResponseError as error:
            reason = str(error)
            if isinstance(error, _TRANSIENT) or reason.startswith(_TRANSIENT_WORDS):
                raise StreamUnavailable(
                    f"{self._shown} cannot serve {verb} of {what!r} now: {reason}",
                    hint="free memory there or raise its maxmemory; the run goes on by itself"
                    if isinstance(error, OutOfMemoryError)
                    else None,
                ) from error
            raise StreamError(f"{self._shown} refused {verb} of {what!r}: {reason}") from error
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
            raise StreamUnavailable(
                f"{self._shown} did not answer {verb} of {what!r}: {type(error).__name__}: {error}"
            ) from error
        except RedisError as error:
            raise StreamError(f"{self._shown} failed at {verb} of {what!r}: {error}") from error


def _connect(address: RedisAddress, options: dict[str, Any]) -> Any:
    common = {
        **options,
        "username": address.username,
        "password": address.password,
        # Protocol 2 needs no HELLO, and keeps replies the same whatever redis-py's default becomes.
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if address.service is not None:
        timeouts = {name: options[name] for name in ("socket_connect_timeout", "socket_timeout")}
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            list(address.hosts), sentinel_kwargs={**timeouts, "retry": common["retry"], "protocol": 2}
        )
        client = sentinel.master_for(address.service, **common)  # type: ignore[no-untyped-call]
    elif address.path is not None:
        pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=address.path, **common)
        client = redis.Redis.from_pool(pool)
    else:
        (host, port), *_ = address.hosts
        kind = SSLConnection if address.scheme == "rediss" else Connection
        client = redis.Redis.from_pool(ConnectionPool(connection_class=kind, host=host, port=port, **common))
    return client


def _entry(entry_id: bytes, fields: dict[bytes, bytes] | None) -> Entry:
    data = fields[_FIELD] if fields is not None and set(fields) == {_FIELD} else None
    return Entry(entry_id.decode(), data)


def _bounds(facts: dict[str, Any]) -> Bounds:
    length: int = facts["length"]
    first_id = facts["first-entry"][0].decode() if facts["first-entry"] else None
    last_id: str = facts["last-generated-id"].decode()
    removed_through: str = facts["max-deleted-entry-id"].decode()
    if facts["entries-added"] > length:
        removable = last_id if first_id is None else preceding(first_id)
        removed_through = max(removed_through, removable, key=position_key)
    return Bounds(length, first_id, last_id, removed_through)
