"""`deltapost ledger`: bring the SQL ledger's schema to this release's, look at it, serve it over HTTP."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from deltapost.cli import rebuild
from deltapost.cli.opening import opened_ledger
from deltapost.cli.options import JsonOption, LedgerOption

# SQLAlchemy and FastAPI are imported by the commands that use them: `--help` answers at once.
if TYPE_CHECKING:
    from deltapost.ledger import Ledger

app = typer.Typer(
    name="ledger",
    help="The SQL ledger: its schema, and the HTTP service that reads it.",
    epilog="Example: deltapost ledger migrate --ledger sqlite:///ledger.db",
    no_args_is_help=True,
)

app.command("rebuild", epilog="Example: deltapost ledger rebuild my-run --store s3://bucket/runs")(
    rebuild.rebuild
)


def _opened(url: str | None) -> AbstractContextManager[Ledger]:
    from deltapost_ledger import LedgerSettings

    return opened_ledger(LedgerSettings.read(ledger_url=url).ledger_url, migrated=False)


@app.command(epilog="Example: deltapost ledger migrate --ledger postgresql://deltapost@db/ledger")
def migrate(ledger: LedgerOption = None, as_json: JsonOption = False) -> None:
    """Bring the schema up to this release's revision. Safe to repeat, and to run twice at once."""
    from deltapost.ledger import revisions

    with _opened(ledger) as opened:
        revision = revisions.migrate(opened)
        _say(opened, revision, as_json)


def _say(ledger: Ledger, revision: str | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"ledger": ledger.name, "revision": revision}))
    else:
        typer.echo(f"{ledger.name} is at revision {revision or 'base'}")


@app.command(epilog="Example: deltapost ledger downgrade base --yes --ledger sqlite:///ledger.db")
def downgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="A revision, or `base` for no schema.")],
    ledger: LedgerOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take the schema down. What the removed tables held is gone; the bucket keeps the records."""
    from deltapost.ledger import revisions

    with _opened(ledger) as opened:
        if not yes:
            typer.confirm(f"Take {opened.name} down to {revision} and lose what that drops?", abort=True)
        reached = revisions.downgrade(opened, revision)
        _say(opened, reached, as_json)


@app.command(epilog="Example: deltapost ledger status --ledger sqlite:///ledger.db")
def status(ledger: LedgerOption = None, as_json: JsonOption = False) -> None:
    """Say whether the ledger has this release's schema. Exit status 1 when it does not."""
    from deltapost.ledger import revisions

    with _opened(ledger) as opened:
        opened.check_revision()
        _say(opened, revisions.head(), as_json)


@app.command(epilog="Example: deltapost ledger serve --port 8800 --ledger sqlite:///ledger.db")
def serve(
    ledger: LedgerOption = None,
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
    from deltapost_ledger import LedgerSettings
    from deltapost_ledger import main as serve_ledger

    serve_ledger(LedgerSettings.read(ledger_url=ledger, ledger_host=host, ledger_port=port))
