"""The containers: compose's file is valid, and says only what this release's settings and commands know."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.main import get_command

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

#: Where a service's environment is read: the prefix of a class's fields, and the class.
SETTINGS = (
    ("DELTAPOST_", "deltapost_aggregator.settings", "AggregatorSettings"),
    ("DELTAPOST_", "deltapost_ledger.settings", "LedgerSettings"),
    ("DELTAPOST_S3_", "deltapost.stores.settings", "StoreSettings"),
)


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file as compose itself reads it."""
    command = [BIN / "docker-compose", "-f", ROOT / "docker" / "compose.yaml", "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path_factory.mktemp("home"))}
    quiet = subprocess.run([*command, "-q"], env=environment, capture_output=True, text=True, timeout=60)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    shown = subprocess.run(
        [*command, "--format", "json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    services: dict[str, Any] = json.loads(shown.stdout)["services"]
    return services


def known_variables() -> set[str]:
    names = {"DELTAPOST_CONFIG"}
    for prefix, module, settings in SETTINGS:
        names |= {prefix + field.upper() for field in getattr(import_module(module), settings).model_fields}
    return names


def test_compose_accepts_its_file_and_runs_every_part(compose: dict[str, Any]) -> None:
    assert set(compose) == {"secrets", "valkey", "objects", "postgres", "migrate", "aggregator", "ledger"}


def test_every_deltapost_variable_is_a_field_of_some_settings(compose: dict[str, Any]) -> None:
    used = {name for service in compose.values() for name in service.get("environment") or {}}
    in_images = set(re.findall(r"\b(DELTAPOST_[A-Z0-9_]+)=", (ROOT / "docker" / "Dockerfile").read_text()))

    ours = {name for name in used | in_images if name.startswith("DELTAPOST_")}
    assert {"DELTAPOST_CONFIG", "DELTAPOST_STORE", "DELTAPOST_SIGNING_KEY_FILE"} <= ours
    assert ours - known_variables() == set()


@pytest.mark.parametrize("service", ["migrate", "aggregator", "ledger"])
def test_each_service_starts_a_command_that_exists_with_options_it_takes(
    compose: dict[str, Any], service: str
) -> None:
    from deltapost.cli.main import app

    words = list(compose[service]["command"])
    command: Any = get_command(app)
    while words and (nested := getattr(command, "commands", {}).get(words[0])):
        command, words = nested, words[1:]

    assert not hasattr(command, "commands")
    command.make_parser(command.make_context(service, [], resilient_parsing=True)).parse_args(words)


def test_nothing_starts_before_what_it_needs(compose: dict[str, Any]) -> None:
    needed = {
        (service, name): waited["condition"]
        for service, described in compose.items()
        for name, waited in (described.get("depends_on") or {}).items()
    }

    assert needed == {
        ("valkey", "secrets"): "service_completed_successfully",
        ("objects", "secrets"): "service_completed_successfully",
        ("postgres", "secrets"): "service_completed_successfully",
        ("migrate", "postgres"): "service_healthy",
        ("aggregator", "migrate"): "service_completed_successfully",
        ("aggregator", "valkey"): "service_healthy",
        ("aggregator", "objects"): "service_healthy",
        ("ledger", "migrate"): "service_completed_successfully",
    }


def test_valkey_keeps_its_log_on_disk_evicts_nothing_and_knows_its_users(compose: dict[str, Any]) -> None:
    words = compose["valkey"]["command"]
    options = dict(zip(words[1::2], words[2::2], strict=True))

    assert options == {
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--maxmemory-policy": "noeviction",
        "--aclfile": "/server-secrets/users.acl",
    }
    assert "-s3.config=/server-secrets/s3.json" in compose["objects"]["command"]


def test_each_service_sees_the_secrets_of_its_own_part_only(compose: dict[str, Any]) -> None:
    mounted = {
        name: {(each["source"], each.get("read_only", False)) for each in service.get("volumes", [])}
        for name, service in compose.items()
    }

    assert mounted["aggregator"] == {("secrets", True)}
    assert mounted["ledger"] == mounted["migrate"] == {("ledger-secrets", True)}
    for server in ("valkey", "objects", "postgres"):
        assert {source for source, _ in mounted[server]} == {server, "server-secrets"}
        assert ("server-secrets", True) in mounted[server]


def test_every_server_is_checked_and_published_on_the_loopback_address_only(compose: dict[str, Any]) -> None:
    # Given the one-shot services, which have nothing to check, and the images that check themselves
    checked_by_image = {"aggregator", "ledger"}
    for name, service in compose.items():
        if service.get("restart") == "no":
            assert service["healthcheck"]["disable"] is True
        elif name not in checked_by_image:
            assert service["healthcheck"]["test"][0] == "CMD"
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports") or [])
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)
    assert all(
        "HEALTHCHECK" in stage for stage in stages if stage.split("\n")[0].split()[-1] in checked_by_image
    )


def test_images_are_pinned_by_tag_and_ours_run_without_root(compose: dict[str, Any]) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    own_stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) - own_stages

    for image in bases | {service["image"] for service in compose.values()}:
        assert re.fullmatch(r"[a-z0-9./-]+:\d+\.\d+[A-Za-z0-9.-]*", image), image
    runtime = dockerfile.split(" AS runtime\n")[1]
    assert re.search(r"^USER deltapost$", runtime, re.MULTILINE)
    assert "USER root" not in runtime


def test_no_password_is_in_the_file_or_in_an_environment(compose: dict[str, Any]) -> None:
    for service in compose.values():
        for name, value in (service.get("environment") or {}).items():
            assert not re.search(r"//[^/]*:[^/]*@", value), name
            assert name.endswith("_FILE") or not re.search("PASSWORD|SECRET", name), name


def test_secrets_are_made_once_and_agree_between_servers_and_clients(tmp_path: Path) -> None:
    folders = secrets, ledger, _servers = [tmp_path / name for name in ("secrets", "ledger", "servers")]
    for folder in folders:
        folder.mkdir()
    command = [ROOT / "docker" / "prepare-secrets", *folders]
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}

    # When it runs twice, as it does when the containers start again
    contents = []
    for _ in range(2):
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        contents.append(
            {
                f"{path.parent.name}/{path.name}": path.read_text()
                for each in folders
                for path in each.iterdir()
            }
        )

    # Then nothing changed, private files are private, and each pair holds one password
    assert contents[0] == contents[1]
    files = contents[0]
    assert set(files) == {
        "secrets/aggregator.key",
        "secrets/s3-credentials",
        "secrets/deltapost.toml",
        "ledger/deltapost.toml",
        "servers/s3.json",
        "servers/users.acl",
        "servers/valkey-operator",
        "servers/postgres-password",
    }
    assert {path.stat().st_mode & 0o077 for path in (*secrets.iterdir(), *ledger.iterdir())} == {0}
    (identity,) = json.loads(files["servers/s3.json"])["identities"]
    assert identity["name"] == "aggregator"
    assert (
        f"aws_secret_access_key = {identity['credentials'][0]['secretKey']}"
        in files["secrets/s3-credentials"].splitlines()
    )
    settings = tomllib.loads(files["secrets/deltapost.toml"])
    address = f"postgresql://deltapost:{files['servers/postgres-password']}@postgres:5432/deltapost"
    assert settings["ledger_url"] == tomllib.loads(files["ledger/deltapost.toml"])["ledger_url"] == address
    # And Valkey is told only the hash of what the aggregator is told.
    password = urlsplit(settings["redis_url"]).password
    assert password is not None
    assert password not in files["servers/users.acl"]
    assert (
        f"user aggregator on #{hashlib.sha256(password.encode()).hexdigest()}" in files["servers/users.acl"]
    )


def test_a_learner_gets_new_passwords_and_keeps_its_runs_until_it_is_revoked(tmp_path: Path) -> None:
    def grant(*words: str) -> str:
        command = [sys.executable, ROOT / "docker" / "grant", *words, "--servers", tmp_path]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def files() -> list[str]:
        return [(tmp_path / name).read_text() for name in ("users.acl", "s3.json")]

    first = grant("learner", "ada", "run-1")
    second = grant("creator", "ada", "run-2")

    assert len(set(first.splitlines()) & set(second.splitlines())) == 4  # all but the two with a password
    (line,) = [line for line in files()[0].splitlines() if line.startswith("user ada ")]
    assert "deltapost:{run-1}:members" in line
    assert "deltapost:{run-2}:members" in line
    (identity,) = json.loads(files()[1])["identities"]
    assert identity["policyNames"] == ["learner-run-1", "learner-run-2", "creator-run-2"]
    before = files()
    for refused in (
        ("learner", "aggregator", "run-1"),
        ("learner", "Ada", "run-1"),
        ("learner", "bob"),
        ("x",),
    ):
        with pytest.raises(subprocess.CalledProcessError):
            grant(*refused)
    assert files() == before

    grant("revoke", "ada")

    assert "user ada " not in files()[0]
    (identity,) = json.loads(files()[1])["identities"]
    assert identity["policyNames"] == []
    assert identity["credentials"][0]["secretKey"] not in first + second
