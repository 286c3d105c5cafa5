"""The `deltapost` command: starts services by name, migrates the ledger, makes keys, runs the demo."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deltapost import __version__
from deltapost.cli import aggregator, doctor, gc, keys, learner, ledger, run
from deltapost.cli.demo import command as demo
from deltapost.errors import DeltapostError

app = typer.Typer(
    name="deltapost",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Contributions over Redis streams, anchors in object storage, rounds in a SQL ledger.\n\n"
    "Example: [bold]deltapost demo[/bold]",
)
app.command("aggregator")(aggregator.aggregator)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("gc", epilog="Example: deltapost gc my-run --plan --store s3://bucket/runs")(gc.gc)
app.add_typer(ledger.app, name="ledger")
app.add_typer(keys.app, name="keys")
app.add_typer(learner.app, name="learner")
app.add_typer(run.app, name="run")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltapost {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Runs the command line; a DeltapostError ends it with one line on stderr and status 1."""
    try:
        app()
    except DeltapostError as error:
        typer.secho(f"deltapost: {error}", err=True, fg=typer.colors.RED if sys.stderr.isatty() else None)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
