"""`deltapost keys`: Ed25519 key files of aggregators and learners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deltapost.cli.options import JsonOption
from deltapost.errors import ConfigurationError
from deltapost.serialization.signing import SigningKey

app = typer.Typer(no_args_is_help=True, help="Make and show signing keys.")


def _show(path: Path, key: SigningKey, as_json: bool) -> None:
    public = key.public.hex()
    typer.echo(json.dumps({"file": str(path), "public_key": public}) if as_json else f"public key {public}")


@app.command()
def generate(
    path: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Leave an existing key file as it is.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a new private key, readable by you alone, and print its public half.

    Example: [bold]deltapost keys generate aggregator.key[/bold]
    """
    try:
        SigningKey.generate().save(path)
    except FileExistsError:
        if not if_missing:
            raise ConfigurationError(
                f"the file {str(path)!r} exists", hint="remove it, or pass --if-missing to keep it"
            ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror}") from None
    _show(path, SigningKey.load(path), as_json)


@app.command()
def show(path: Annotated[Path, typer.Argument(help="Key file.")], as_json: JsonOption = False) -> None:
    """Print the public half of a key file.

    Example: [bold]deltapost keys show aggregator.key[/bold]
    """
    _show(path, SigningKey.load(path), as_json)
