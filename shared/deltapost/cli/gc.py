"""`deltapost gc`: deletes what no record names, and what retention lets go; or says what would go."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from deltapost.cli.opening import opened_ledger
from deltapost.cli.options import JsonOption, LedgerOption, RunArgument, StoreOption
from deltapost.cli.progress import progress_on_stderr


def gc(
    run: RunArgument,
    plan: Annotated[bool, typer.Option("--plan", help="Delete nothing: say what would go.")] = False,
    retain: Annotated[
        str | None,
        typer.Option(help="Also let go of rounds: keep rounds=K or days=D. [DELTAPOST_RETAIN]"),
    ] = None,
    uploads_older_than: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Abort uploads without a new part for so long. [DELTAPOST_ABANDONED_UPLOAD_SECONDS]",
        ),
    ] = None,
    store: StoreOption = None,
    ledger: LedgerOption = None,
    signing_key_file: Annotated[
        str | None,
        typer.Option(help="Signs what --retain lets go. [DELTAPOST_SIGNING_KEY_FILE]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Collect a run's garbage: objects of decided rounds that no record names, and killed uploads.

    With --retain also what only older rounds need; a signed note in the bucket says so first. Records stay.
    With --plan: what would go, how much, and the bytes and requests of a day at the present pace. Safe beside
    running aggregators, which do the same for their fragments.
    """
    from deltapost.algorithms.retention import Retain
    from deltapost.audit.history import BucketHistory
    from deltapost.errors import ConfigurationError
    from deltapost.serialization.signing import SigningKey
    from deltapost.stores import open_store
    from deltapost_aggregator.settings import CollectorSettings
    from deltapost_aggregator.storage_report import collect

    settings = CollectorSettings.read(
        store=store,
        ledger_url=ledger,
        retain=retain,
        signing_key_file=signing_key_file,
        abandoned_upload_seconds=uploads_older_than,
    )
    history = BucketHistory.open(open_store(settings.store), run)
    key = None
    if settings.retain and not plan:
        if settings.signing_key_file is None:
            raise ConfigurationError(
                "letting go of rounds is signed with the run's aggregator key, and none is named",
                hint="set DELTAPOST_SIGNING_KEY_FILE or --signing-key-file; --plan needs none",
            )
        key = SigningKey.load(settings.signing_key_file)
        if key.public != history.aggregator_key:
            raise ConfigurationError(
                f"{settings.signing_key_file!r} is not the aggregator key of run {run!r}",
                hint="deltapost keys show FILE says which key a file holds",
            )
    with (
        opened_ledger(settings.ledger_url) as opened,
        progress_on_stderr(f"objects of {run}", shown=not as_json) as progress,
    ):
        report = collect(
            opened,
            history,
            plan=plan,
            retain=Retain.parse(settings.retain) if settings.retain else None,
            key=key,
            idle_seconds=settings.abandoned_upload_seconds,
            poll_seconds=settings.poll_seconds,
            progress=progress,
        )
    _say(report.to_plain(), as_json)


def _say(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report['run']}: what {'would go' if report['planned'] else 'went'}, and what stays"
    )
    for heading in ("area", "", "objects", "bytes"):
        table.add_column(heading, justify="left" if heading in ("area", "") else "right")
    words = {
        "unnamed": "goes: no record names it",
        "released": "goes: let go by retention",
        "kept": "stays",
        "open": "stays: its round is open",
        "foreign": "stays: nobody's",
    }
    for area, tallies in report["areas"].items():
        for judgement, tally in tallies.items():
            table.add_row(area, words[judgement], f"{tally['objects']:,}", f"{tally['bytes']:,}")
    console = Console()
    console.print(table)
    for key in report["foreign"]["keys"]:
        console.print(f"no key of ours, never touched: {key!r}", highlight=False)
    for upload in report["uploads"]:
        what = upload["key"] or upload["upload"]
        console.print(f"upload without a new part for {upload['idle_seconds']:.0f} s: {what}")
    _say_forecast(report["forecast"], report["retain"])


def _say_forecast(forecast: dict[str, Any], policy: str) -> None:
    typer.echo(
        f"at the present pace: {forecast['rounds_per_day']:,.1f} rounds, "
        f"{forecast['bytes_per_day'] / 1e9:,.3f} GB, {forecast['puts_per_day']:,.0f} PUTs and "
        f"{forecast['gets_per_day']:,.0f} GETs a day; idle looks for records: at most "
        f"{forecast['idle_looks_per_day']:,.0f} GETs a day"
    )
    settles = forecast["settles_at_bytes"]
    if settles is None:
        typer.echo(f"retain {policy}: it grows by {forecast['bytes_per_day'] / 1e9:,.3f} GB a day")
    else:
        typer.echo(f"retain {policy}: it settles at about {settles / 1e9:,.3f} GB, records apart")
