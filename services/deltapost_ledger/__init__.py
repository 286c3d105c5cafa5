"""The ledger service: runs, rounds, participants and verdicts as JSON over HTTP, read only."""

from __future__ import annotations

import uvicorn

from deltapost.ledger import open_ledger
from deltapost.settings import listen, reveal
from deltapost_ledger.app import create_app
from deltapost_ledger.settings import LedgerSettings

__all__ = ["LedgerSettings", "create_app", "main"]

#: Seconds that requests under way get when the service is told to stop.
_STOP_SECONDS = 5


def main(settings: LedgerSettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises WrongRevision, which names the command, before it listens."""
    ledger = open_ledger(reveal(settings.ledger_url))
    try:
        ledger.check_revision()
        config = uvicorn.Config(
            create_app(ledger),
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        with listen(settings.ledger_host, settings.ledger_port, setting="DELTAPOST_LEDGER_PORT") as socket:
            uvicorn.Server(config).run(sockets=[socket])
    finally:
        ledger.close()
