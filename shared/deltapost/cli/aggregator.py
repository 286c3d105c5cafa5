"""`deltapost aggregator`: runs the aggregator service until it is told to stop."""

from __future__ import annotations

import signal
from enum import StrEnum
from types import FrameType
from typing import Annotated

import typer

from deltapost.cli.logs import log_to_stderr


class LogForm(StrEnum):
    """How log lines look."""

    text = "text"
    json = "json"


def aggregator(
    redis_url: Annotated[str | None, typer.Option(help="Redis or Valkey. [DELTAPOST_REDIS_URL]")] = None,
    store: Annotated[
        str | None, typer.Option(help="s3://bucket/prefix or file:///dir. [DELTAPOST_STORE]")
    ] = None,
    ledger_url: Annotated[
        str | None,
        typer.Option("--ledger", help="postgresql://… or sqlite:///PATH. [DELTAPOST_LEDGER_URL]"),
    ] = None,
    signing_key_file: Annotated[
        str | None, typer.Option(help="The aggregators' key. [DELTAPOST_SIGNING_KEY_FILE]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="This process in ledger and attestations. [DELTAPOST_AGGREGATOR_NAME]")
    ] = None,
    runs: Annotated[
        str | None, typer.Option(help="Run ids to serve, comma-separated, or *. [DELTAPOST_SERVE_RUNS]")
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(help="Port of /healthz and /readyz; 0: off. [DELTAPOST_AGGREGATOR_HEALTH_PORT]"),
    ] = None,
    retain: Annotated[
        str | None,
        typer.Option(
            help="Keep the inputs and states of rounds=K or days=D; default: for ever. [DELTAPOST_RETAIN]"
        ),
    ] = None,
    log: Annotated[LogForm, typer.Option(help="Form of the log on stderr.")] = LogForm.text,
) -> None:
    """Serve runs: read envelopes, close rounds, commit anchors, keep the ledger.

    Settings come from the flags, else from DELTAPOST_… variables, else from the TOML file that
    DELTAPOST_CONFIG names.

    Example: [bold]deltapost aggregator --redis-url redis://localhost --store file:///srv/runs
    --ledger sqlite:///ledger.db --signing-key-file aggregator.key[/bold]
    """
    from deltapost_aggregator.service import AggregatorService, open_services
    from deltapost_aggregator.settings import AggregatorSettings

    log_to_stderr(log.value)
    settings = AggregatorSettings.read(
        redis_url=redis_url,
        store=store,
        ledger_url=ledger_url,
        signing_key_file=signing_key_file,
        aggregator_name=name,
        serve_runs=runs,
        aggregator_health_port=health_port,
        retain=retain,
    )
    service = AggregatorService(open_services(settings))

    def stop(_signal: int, _frame: FrameType | None) -> None:
        service.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    service.run()
