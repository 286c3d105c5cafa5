"""The containers: compose's file is valid, and says only what this release's settings and commands know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

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
    assert {"DELTAPOST_REDIS_URL", "DELTAPOST_STORE", "DELTAPOST_SIGNING_KEY_FILE"} <= ours
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
        ("objects", "secrets"): "service_completed_successfully",
        ("postgres", "secrets"): "service_completed_successfully",
        ("migrate", "postgres"): "service_healthy",
        ("aggregator", "migrate"): "service_completed_successfully",
        ("aggregator", "valkey"): "service_healthy",
        ("aggregator", "objects"): "service_healthy",
        ("ledger", "migrate"): "service_completed_successfully",
    }


def test_valkey_keeps_its_log_on_disk_and_evicts_nothing(compose: dict[str, Any]) -> None:
    words = compose["valkey"]["command"]
    options = dict(zip(words[1::2], words[2::2], strict=True))

    assert options == {"--appendonly": "yes", "--appendfsync": "everysec", "--maxmemory-policy": "noeviction"}


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
    secrets, servers = tmp_path / "secrets", tmp_path / "servers"
    secrets.mkdir()
    servers.mkdir()
    command = [ROOT / "docker" / "prepare-secrets", secrets, servers]
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}

    # When it runs twice, as it does when the containers start again
    contents = []
    for _ in range(2):
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
        contents.append(
            {path.name: path.read_bytes() for folder in (secrets, servers) for path in folder.iterdir()}
        )

    # Then nothing changed, private files are private, and each pair holds one password
    assert contents[0] == contents[1]
    assert set(contents[0]) == {
        "aggregator.key",
        "s3-credentials",
        "deltapost.toml",
        "s3.json",
        "postgres-password",
    }
    assert {path.stat().st_mode & 0o077 for path in secrets.iterdir()} == {0}
    identity = json.loads(contents[0]["s3.json"])["identities"][0]["credentials"][0]
    assert (
        f"aws_secret_access_key = {identity['secretKey']}"
        in contents[0]["s3-credentials"].decode().splitlines()
    )
    address = tomllib.loads(contents[0]["deltapost.toml"].decode())["ledger_url"]
    assert (
        address
        == f"postgresql://deltapost:{contents[0]['postgres-password'].decode()}@postgres:5432/deltapost"
    )
