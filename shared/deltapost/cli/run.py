"""`deltapost run`: the ledger's runs, and the end of one."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

from deltapost.cli.opening import opened_ledger
from deltapost.cli.options import JsonOption, LedgerOption, RunArgument

if TYPE_CHECKING:
    from deltapost.ledger import Ledger

app = typer.Typer(
    name="run",
    help="The runs of a ledger: list, show, finish.",
    epilog="Example: deltapost run list --ledger sqlite:///ledger.db",
    no_args_is_help=True,
)

#: Seconds between two looks at how far the end has come.
LOOK_SECONDS = 0.5


def _opened(url: str | None) -> AbstractContextManager[Ledger]:
    from deltapost_ledger import LedgerSettings

    return opened_ledger(LedgerSettings.read(ledger_url=url).ledger_url)


@app.command("list", epilog="Example: deltapost run list --json")
def list_runs(ledger: LedgerOption = None, as_json: JsonOption = False) -> None:
    """Show every run with its state and how far it is."""
    from deltapost.ledger import queries

    with _opened(ledger) as opened, opened.read() as session:
        found = [
            {"run": r.run, "state": r.state, "fragments": r.fragments, "rounds": r.rounds}
            for r in queries.runs(session)
        ]
    if as_json:
        typer.echo(json.dumps({"runs": found}))
    for row in [] if as_json else found:
        typer.echo(
            f"{row['run']:<32}  {row['state']:<8}  {row['rounds']} rounds, {row['fragments']} fragments"
        )


@app.command(epilog="Example: deltapost run show first-run")
def show(run: RunArgument, ledger: LedgerOption = None, as_json: JsonOption = False) -> None:
    """Show where each fragment of a run stands, and whether it has ended."""
    from deltapost.errors import LedgerError
    from deltapost.ledger import ending, queries

    with _opened(ledger) as opened:
        ends = ending.ends(opened, run)
        asked = ending.requested(opened, run)
        with opened.read() as session:
            summary = queries.find_run(session, run)
            fragments = [
                {
                    "fragment": row.fragment,
                    "head": row.head,
                    "owner": row.owner,
                    "waiting": row.waiting_reason,
                    "ended": row.fragment in ends,
                }
                for row in queries.fragments_of(session, run)
            ]
    if summary is None:
        raise LedgerError(f"this ledger has no run {run!r}", hint="see: deltapost run list")
    if as_json:
        found = {"run": run, "state": summary.state, "finish_requested": asked, "fragments": fragments}
        typer.echo(json.dumps(found))
        return
    typer.echo(f"run {run} is {summary.state}" + (", asked to finish" if asked else ""))
    for row in fragments:
        word = "ended" if row["ended"] else row["waiting"] or ""
        typer.echo(f"fragment {row['fragment']:>4}  version {row['head']:<8}  {word}")


@app.command(epilog="Example: deltapost run finish first-run --wait 60")
def finish(
    run: RunArgument,
    ledger: LedgerOption = None,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="Wait so long for the aggregators to end it."),
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """End a run for good: sealed rounds are committed, all else is answered, learners are told."""
    from deltapost.ledger import ending, queries

    with _opened(ledger) as opened:
        state = ending.request(opened, run)
        deadline, told = time.monotonic() + wait, -1
        while state != "finished" and time.monotonic() < deadline:
            with opened.read() as session:
                fragments = len(queries.fragments_of(session, run))
            ended = len(ending.ends(opened, run))
            if ended != told and not as_json:
                typer.echo(f"{ended} of {fragments} fragments have ended", err=True)
            told = ended
            time.sleep(LOOK_SECONDS)
            state = ending.state(opened, run) or state
    if as_json:
        typer.echo(json.dumps({"run": run, "state": state, "finish_requested": True}))
    elif state == "finished":
        typer.echo(f"run {run} is finished")
    else:
        typer.echo(
            f"run {run} is to finish: an aggregator that serves it ends each fragment at its next step"
        )
    if wait and state != "finished":
        raise typer.Exit(1)
