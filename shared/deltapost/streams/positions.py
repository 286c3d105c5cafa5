"""Entry ids as positions: which strings are ids, and what comes right before and after one."""

from __future__ import annotations

import re
from typing import Final

from deltapost.errors import StreamError
from deltapost.streams import START, position_key

_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_LARGEST: Final = 2**64 - 1


def check_position(entry_id: str) -> str:
    """`entry_id`, if it is a complete id; else StreamError. Redis' special ids (`$`, `>`, `-`) are none."""
    if _ID.fullmatch(entry_id) is None or max(position_key(entry_id)) > _LARGEST:
        raise StreamError(f"{entry_id!r:.60} is no entry id", hint="ids are MILLISECONDS-SEQUENCE")
    return entry_id


def following(entry_id: str) -> str:
    """The lowest id above `entry_id`."""
    milliseconds, sequence = position_key(entry_id)
    return f"{milliseconds}-{sequence + 1}" if sequence < _LARGEST else f"{milliseconds + 1}-0"


def preceding(entry_id: str) -> str:
    """The highest id below `entry_id`; START has none below and gives itself."""
    milliseconds, sequence = position_key(entry_id)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{milliseconds - 1}-{_LARGEST}" if milliseconds else START
