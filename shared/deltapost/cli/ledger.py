"""`deltapost ledger`: bring the SQL ledger's schema to this release's, look at it, serve it over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from deltapost.ledger import Ledger, open_ledger, revisions
from deltapost.settings import reveal
from deltapost_ledger import LedgerSettings
from deltapost_ledger import main as serve_ledger

app = typer.Typer(
    name="ledger",
    help="The SQL ledger: its schema, and the HTTP service that reads it.",
    epilog="Example: deltapost ledger migrate --ledger sqlite:///ledger.db",
    no_args_is_help=True,
)

LedgerUrl = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        show_default=False,
        help="sqlite:///PATH or postgresql://USER@HOST/DATABASE. Default: DELTAPOST_LEDGER_URL.",
    ),
]


@contextmanager
def _opened(url: str | None) -> Iterator[Ledger]:
    ledger = open_ledger(reveal(LedgerSettings.read(ledger_url=url).ledger_url))
    try:
        yield ledger
    finally:
        ledger.close()


@app.command(epilog="Example: deltapost ledger migrate --ledger postgresql://deltapost@db/ledger")
def migrate(ledger: LedgerUrl = None) -> None:
    """Bring the schema up to this release's revision. Safe to repeat, and to run twice at once."""
    with _opened(ledger) as opened:
        revision = revisions.migrate(opened)
        typer.echo(f"{opened.name} is at revision {revision}")


@app.command(epilog="Example: deltapost ledger downgrade base --yes --ledger sqlite:///ledger.db")
def downgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="A revision, or `base` for no schema.")],
    ledger: LedgerUrl = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Take the schema down. What the removed tables held is gone; the bucket keeps the records."""
    with _opened(ledger) as opened:
        if not yes:
            typer.confirm(f"Take {opened.name} down to {revision} and lose what that drops?", abort=True)
        reached = revisions.downgrade(opened, revision)
        typer.echo(f"{opened.name} is at revision {reached or 'base'}")


@app.command(epilog="Example: deltapost ledger status --ledger sqlite:///ledger.db")
def status(ledger: LedgerUrl = None) -> None:
    """Say whether the ledger has this release's schema. Exit status 1 when it does not."""
    with _opened(ledger) as opened:
        opened.check_revision()
        typer.echo(f"{opened.name} is at revision {revisions.head()}, which this release works with")


@app.command(epilog="Example: deltapost ledger serve --port 8800 --ledger sqlite:///ledger.db")
def serve(
    ledger: LedgerUrl = None,
    host: Annotated[
        str | None,
        typer.Option(show_default=False, help="Default: DELTAPOST_LEDGER_HOST, or 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(show_default=False, help="Default: DELTAPOST_LEDGER_PORT, or 8800."),
    ] = None,
) -> None:
    """Serve runs, rounds, participants and verdicts as JSON, until stopped."""
    serve_ledger(LedgerSettings.read(ledger_url=ledger, ledger_host=host, ledger_port=port))
