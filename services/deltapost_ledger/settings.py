"""LedgerSettings: everything the ledger service and `deltapost ledger` are told."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from deltapost.settings import Settings


class LedgerSettings(Settings):
    """Settings of `deltapost ledger`; each is `DELTAPOST_` and its name in capitals."""

    ledger_url: SecretStr
    #: The service has no log-in: on another address than the loopback one, put a proxy with one before it.
    ledger_host: str = "127.0.0.1"
    ledger_port: Annotated[int, Field(ge=0, le=65535)] = 8800
