"""`deltapost ledger rebuild`: the SQL ledger of a run again, from its bucket."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from deltapost.cli.opening import opened_ledger
from deltapost.cli.options import JsonOption, LedgerOption, RunArgument, StoreOption
from deltapost.cli.progress import progress_on_stderr

if TYPE_CHECKING:
    from deltapost.audit.rebuild import Rebuilt


def rebuild(
    run: RunArgument,
    store: StoreOption = None,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's rounds, participants and verdicts again from its bucket, verifying every record.

    Into an empty ledger (after `deltapost ledger migrate`) or one that lost some of it; running aggregators
    may go on. Safe to repeat. Exit status 1 when something in the bucket does not hold: it says what, and how
    far it came.
    """
    from deltapost.audit.rebuild import rebuild as rebuild_run
    from deltapost.audit.settings import AuditSettings
    from deltapost.stores import open_store

    settings = AuditSettings.read(store=store, ledger_url=ledger)
    with (
        opened_ledger(settings.ledger_url) as opened,
        progress_on_stderr(f"records of {run}", shown=not as_json) as progress,
    ):
        rebuilt = rebuild_run(opened, open_store(settings.store), run, progress=progress)
    _say(rebuilt, as_json)
    raise typer.Exit(0 if rebuilt.stopped is None else 1)


def _say(rebuilt: Rebuilt, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(rebuilt)))
        return
    typer.echo(
        f"{rebuilt.run}: {rebuilt.added} rounds added, {rebuilt.completed} completed, "
        f"{rebuilt.learners} learners added"
    )
    for fragment in rebuilt.fragments:
        note = f": {fragment.note}" if fragment.note else ""
        typer.echo(f"  fragment {fragment.fragment}: version {fragment.head} of {fragment.records}{note}")
    if rebuilt.stopped is not None:
        typer.echo(f"stopped: {rebuilt.stopped}", err=True)
