"""Opens the log that a URL names, and says what is wrong with a URL that names none."""

from __future__ import annotations

import re
from typing import Final

from deltapost.errors import ConfigurationError
from deltapost.streams import MessageLog
from deltapost.streams.memory import shared
from deltapost.streams.urls import SCHEMES

_NAME: Final = re.compile(r"memory://([A-Za-z0-9._-]{1,128})")


def open_log(url: str) -> MessageLog:
    """The log of `url`; nothing connects yet. Raises ConfigurationError without repeating credentials."""
    if named := _NAME.fullmatch(url):
        return shared(named[1])
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigurationError(
            "the stream URL names no log", hint=f"use memory://NAME or one of {', '.join(SCHEMES)} with '://'"
        )
    from deltapost.streams.redis import RedisLog

    return RedisLog(url)
