"""What a Redis URL says, checked before anything connects, and shown without its secrets.

::

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]          rediss://… the same over TLS
    unix://[USER:PASSWORD@]/PATH
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]/SERVICE[/DB]

`?` options: `db`, `socket_timeout`, `socket_connect_timeout`, `health_check_interval` (seconds),
`client_name`, and for TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (paths), `ssl_check_hostname`,
`ssl_cert_reqs`. Credentials may be percent-encoded. With Sentinel they are the server's, not the sentinels'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from deltapost.errors import ConfigurationError

SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel")
_DEFAULT_PORTS: Final = {"redis": 6379, "rediss": 6379, "redis+sentinel": 26379}


def _boolean(text: str) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]


_OPTIONS: Final[Mapping[str, Callable[[str], object]]] = {
    "db": int,
    "socket_timeout": float,
    "socket_connect_timeout": float,
    "health_check_interval": int,
    "client_name": str,
}
_TLS_OPTIONS: Final[Mapping[str, Callable[[str], object]]] = {
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_check_hostname": _boolean,
    "ssl_cert_reqs": str,
}


@dataclass(frozen=True)
class RedisAddress:
    """A checked URL. `options` are redis-py connection arguments; `path` is a socket's."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    path: str | None
    service: str | None
    username: str | None
    password: str | None = field(repr=False)
    options: Mapping[str, Any]

    def __str__(self) -> str:
        """The URL without user, password and options."""
        where = self.path or ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        service = f"/{self.service}" if self.service else ""
        return f"{self.scheme}://{where}{service}" + ("" if self.path else f"/{self.options['db']}")


def parse_redis_url(url: str) -> RedisAddress:
    """The parts of `url`. Raises ConfigurationError, which never repeats the URL: it may hold a password."""
    try:
        return _parse(urlsplit(url))
    except (ValueError, KeyError) as error:
        # `from None`: what int() or urlsplit() say may quote the URL.
        kind = f" ({error})" if isinstance(error, _UnusableError) else ""
        raise ConfigurationError(
            f"the Redis URL cannot be used{kind}",
            hint="redis://[USER:PASSWORD@]HOST:PORT/DB, rediss://…, unix:///PATH or "
            "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB",
        ) from None


class _UnusableError(ValueError):
    """Says what is wrong in words that hold nothing of the URL but names of options."""


def _parse(parts: SplitResult) -> RedisAddress:
    if parts.scheme not in SCHEMES:
        raise _UnusableError(f"its scheme must be one of {', '.join(SCHEMES)}")
    userinfo, _, location = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    path = service = None
    hosts: tuple[tuple[str, int], ...] = ()
    segments = [unquote(segment) for segment in parts.path.strip("/").split("/") if segment]
    if parts.scheme == "unix":
        if location or not parts.path:
            raise _UnusableError("a socket needs a path and has no host: unix:///PATH")
        path, segments = unquote(parts.path), []
    else:
        hosts = tuple(_host(part, _DEFAULT_PORTS[parts.scheme]) for part in location.split(","))
    if parts.scheme == "redis+sentinel":
        if not segments:
            raise _UnusableError("a Sentinel URL needs the name of the service")
        service = segments.pop(0)
    elif len(hosts) > 1:
        raise _UnusableError("it names several hosts, which only redis+sentinel:// may")
    options = _options(parts.scheme, parts.query)
    if len(segments) > 1 or (segments and "db" in options):
        raise _UnusableError("it names more than one database")
    options["db"] = int(segments[0]) if segments else options.get("db", 0)
    return RedisAddress(
        parts.scheme, hosts, path, service, unquote(user) or None, unquote(password) or None, options
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise _UnusableError("a host is missing")
    return parts.hostname, parts.port or default_port


def _options(scheme: str, query: str) -> dict[str, Any]:
    known = {**_OPTIONS, **(_TLS_OPTIONS if scheme == "rediss" else {})}
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        if name not in known:
            raise _UnusableError(f"options of {scheme}:// are {', '.join(known)}; one given is none of them")
        try:
            options[name] = known[name](text)
        except (ValueError, KeyError):
            raise _UnusableError(f"the option {name} has an unusable value") from None
    return options
