"""`deltapost learner`: who may speak for which learner id of a run, as its creator says it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltapost.cli.options import JsonOption, RunArgument, StoreOption
from deltapost.errors import ConfigurationError
from deltapost.serialization.names import check_id
from deltapost.settings import Settings

if TYPE_CHECKING:
    from deltapost.algorithms.key_history import KeyHistory
    from deltapost.serialization.records import Manifest
    from deltapost.serialization.registry import KeyAction, KeyEntry
    from deltapost.stores import ObjectStore

app = typer.Typer(
    name="learner",
    help="The registry of a run's learner keys: add, rotate, revoke, list.",
    epilog="Example: deltapost learner list first-run --store s3://bucket/runs",
    no_args_is_help=True,
)

LearnerArgument = Annotated[str, typer.Argument(metavar="LEARNER", help="The learner's id in the run.")]
KeyArgument = Annotated[
    str,
    typer.Argument(
        metavar="PUBLIC_KEY",
        help="Its public key, 64 hexadecimal digits: `deltapost keys show FILE` prints it.",
    ),
]
FromVersion = Annotated[
    int | None,
    typer.Option(
        "--from-version",
        metavar="N",
        min=0,
        show_default=False,
        help="Base version from which on this counts. Default: for add the rounds now open, "
        "else the first that no fragment has reached.",
    ),
]
CreatorKey = Annotated[
    str | None,
    typer.Option(
        "--creator-key-file",
        metavar="FILE",
        show_default=False,
        help="Key file of the run's creator: the learner that made it. Default: DELTAPOST_SIGNING_KEY_FILE.",
    ),
]


class _Settings(Settings):
    store: str
    signing_key_file: str | None = None


@app.command(epilog=f"Example: deltapost learner add first-run bob {'ab' * 4}…")
def add(
    run: RunArgument,
    learner: LearnerArgument,
    public_key: KeyArgument,
    from_version: FromVersion = None,
    store: StoreOption = None,
    creator_key_file: CreatorKey = None,
    as_json: JsonOption = False,
) -> None:
    """Let a key speak for a learner id that has none."""
    settings = _Settings.read(store=store, signing_key_file=creator_key_file)
    _change("add", settings, run, learner, _key(public_key), from_version, as_json)


@app.command(epilog=f"Example: deltapost learner rotate first-run bob {'cd' * 4}…")
def rotate(
    run: RunArgument,
    learner: LearnerArgument,
    public_key: KeyArgument,
    from_version: FromVersion = None,
    store: StoreOption = None,
    creator_key_file: CreatorKey = None,
    as_json: JsonOption = False,
) -> None:
    """Replace a learner's key: the new one counts at once, the old one until that version."""
    settings = _Settings.read(store=store, signing_key_file=creator_key_file)
    _change("rotate", settings, run, learner, _key(public_key), from_version, as_json)


@app.command(epilog="Example: deltapost learner revoke first-run bob")
def revoke(
    run: RunArgument,
    learner: LearnerArgument,
    from_version: FromVersion = None,
    store: StoreOption = None,
    creator_key_file: CreatorKey = None,
    as_json: JsonOption = False,
) -> None:
    """Take a learner's key away: from that version on nobody speaks for the id, and nobody waits for it."""
    settings = _Settings.read(store=store, signing_key_file=creator_key_file)
    _change("revoke", settings, run, learner, None, from_version, as_json)


@app.command("list", epilog="Example: deltapost learner list first-run --json")
def list_keys(run: RunArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show every key of the registry and from which version on it counts, oldest first."""
    _, manifest, history = _opened(_Settings.read(store=store), run)
    entries = sorted(
        (entry for learner in history.learners() for entry in history.entries(learner)),
        key=lambda entry: entry.number,
    )
    if as_json:
        found = {
            "run": run,
            "admission": manifest.admission,
            "entries": [_fields(entry) for entry in entries],
        }
        typer.echo(json.dumps(found))
        return
    typer.echo(f"run {run} is {manifest.admission}; its registry has {len(entries)} entries")
    for entry in entries:
        key = entry.public_key.hex() if entry.public_key is not None else "-"
        typer.echo(
            f"{entry.number:>6}  {entry.action:<6}  {entry.learner:<24}  "
            f"from version {entry.from_version:<8}  {key}"
        )


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigurationError(
            f"{text!r:.80} is no public key of 64 hexadecimal digits",
            hint="print a key file's with: deltapost keys show FILE",
        )
    return key


def _opened(settings: _Settings, run: str) -> tuple[ObjectStore, Manifest, KeyHistory]:
    from deltapost.algorithms.key_history import KeyHistory
    from deltapost.errors import ObjectMissing
    from deltapost.limits import MAX_DOCUMENT_BYTES
    from deltapost.serialization.names import manifest_key
    from deltapost.serialization.records import Manifest
    from deltapost.stores import open_store
    from deltapost.stores.registry import read_on

    store = open_store(settings.store)
    try:
        data = store.get(manifest_key(check_id("run", run)), length=MAX_DOCUMENT_BYTES + 1).data
    except ObjectMissing:
        raise ConfigurationError(
            f"there is no run {run!r} in the store", hint="the learner that joins it first creates it"
        ) from None
    manifest = Manifest.from_bytes(data)
    return store, manifest, read_on(store, manifest, KeyHistory(manifest))


def _change(
    action: KeyAction,
    settings: _Settings,
    run: str,
    learner: str,
    public_key: bytes | None,
    from_version: int | None,
    as_json: bool,
) -> None:
    from deltapost.serialization.signing import SigningKey
    from deltapost.stores.heads import heads
    from deltapost.stores.registry import register

    check_id("learner", learner)
    if settings.signing_key_file is None:
        raise ConfigurationError(
            "the key of the run's creator is needed to sign this",
            hint="name its file with --creator-key-file, or DELTAPOST_SIGNING_KEY_FILE",
        )
    creator = SigningKey.load(settings.signing_key_file)
    store, manifest, history = _opened(settings, run)
    reached = heads(store, run, len(manifest.fragments))
    version = from_version
    if version is None:
        known = history.entries(learner)
        version = min(reached) if action == "add" else max(reached) + 1
        version = max([version, *(entry.from_version for entry in known[-1:])])
    elif version < min(reached):
        raise ConfigurationError(
            f"version {version} is behind: every fragment of run {run!r} has reached version {min(reached)}",
            hint="what was committed stays as it is: use a later --from-version, or none",
        )
    entry = register(store, manifest, creator, action, learner, public_key, from_version=version)
    if as_json:
        typer.echo(json.dumps({"run": run, **_fields(entry), "heads": reached}))
    else:
        typer.echo(
            f"{_DONE[action].format(learner)} from version {version} on "
            f"(entry {entry.number}; run {run} is at versions {min(reached)} to {max(reached)})"
        )


_DONE = {
    "add": "{} may contribute",
    "rotate": "{}'s new key counts now; the old one ends",
    "revoke": "nobody speaks for {}",
}


def _fields(entry: KeyEntry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "action": entry.action,
        "learner": entry.learner,
        "public_key": entry.public_key.hex() if entry.public_key is not None else None,
        "from_version": entry.from_version,
    }
