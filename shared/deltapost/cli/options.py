"""Arguments and options that several commands take, each in one form."""

from __future__ import annotations

from typing import Annotated

import typer

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        show_default=False,
        help="s3://BUCKET/PREFIX or file:///DIRECTORY. Default: DELTAPOST_STORE.",
    ),
]
LedgerOption = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        show_default=False,
        help="sqlite:///PATH or postgresql://USER@HOST/DATABASE. Default: DELTAPOST_LEDGER_URL.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
