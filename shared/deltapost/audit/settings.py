"""AuditSettings: where the bucket and the ledger are, for the commands that read one and write the other."""

from __future__ import annotations

from pydantic import SecretStr

from deltapost.settings import Settings


class AuditSettings(Settings):
    """Settings of `deltapost ledger rebuild`; each is `DELTAPOST_` and its name in capitals."""

    store: str
    ledger_url: SecretStr
