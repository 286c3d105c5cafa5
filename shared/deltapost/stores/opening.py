"""Opens the store that a URL names, and says what is wrong with a URL that names none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from deltapost.errors import ConfigurationError, StoreError
from deltapost.stores import ObjectStore
from deltapost.stores.directory import DirectoryStore
from deltapost.stores.keys import check_prefix
from deltapost.stores.memory import shared

_FORMS: Final = "use s3://bucket/prefix, file:///directory or memory://NAME"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


def open_store(url: str, **options: object) -> ObjectStore:
    """The store of `url`; `options` are `StoreSettings` fields, for s3:// only. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"the store URL {url!r} cannot be read", hint=_FORMS) from error
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigurationError(
            f"the store URL of scheme {parts.scheme!r} carries credentials, '?' or '#'",
            hint="give options as arguments or DELTAPOST_S3_… variables",
        )
    if parts.scheme == "s3":
        return _open_s3(url, parts.netloc, parts.path, options)
    if options:
        raise ConfigurationError(
            f"a store of scheme {parts.scheme!r} takes no options, got {sorted(options)}"
        )
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and Path(parts.path).is_absolute():
        return DirectoryStore(unquote(parts.path))
    if parts.scheme == "memory" and not parts.path and _NAME.fullmatch(parts.netloc):
        return shared(parts.netloc)
    raise ConfigurationError(f"the store URL {url!r} names no store", hint=_FORMS)


def _open_s3(url: str, bucket: str, path: str, options: dict[str, object]) -> ObjectStore:
    from deltapost.stores.s3 import S3Store
    from deltapost.stores.settings import read_settings

    prefix = path.strip("/")
    try:
        check_prefix(prefix)
    except StoreError as error:
        raise ConfigurationError(
            f"the store URL {url!r} has a prefix that is no key", hint=str(error)
        ) from error
    if not bucket:
        raise ConfigurationError(f"the store URL {url!r} names no bucket", hint=_FORMS)
    return S3Store(bucket, prefix, read_settings(**options))
