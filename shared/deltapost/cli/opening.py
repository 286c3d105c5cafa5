"""Opening what a command works on, and closing it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltapost.settings import reveal

if TYPE_CHECKING:
    from pydantic import SecretStr

    from deltapost.ledger import Ledger


@contextmanager
def opened_ledger(url: SecretStr, *, migrated: bool = True) -> Iterator[Ledger]:
    """The ledger at the URL. Raises WrongRevision unless it is at this release's, where it has to be."""
    from deltapost.ledger import open_ledger

    ledger = open_ledger(reveal(url))
    try:
        if migrated:
            ledger.check_revision()
        yield ledger
    finally:
        ledger.close()
