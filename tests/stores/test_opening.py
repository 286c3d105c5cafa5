"""URLs and settings: what opens a store, and errors that say what is wrong without showing secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deltapost.errors import ConfigurationError
from deltapost.stores import open_store
from deltapost.stores.settings import read_settings

SECRET = "a-secret-that-must-not-show"


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in type(read_settings()).model_fields:
        monkeypatch.delenv(f"DELTAPOST_S3_{field.upper()}", raising=False)


def test_a_memory_url_names_one_store_per_process() -> None:
    first, same, other = (open_store(f"memory://{name}") for name in ("opening-a", "opening-a", "opening-b"))
    first.put("run/key", b"x")
    assert same.get("run/key").data == b"x"
    assert list(other.list("")) == []


def test_a_file_url_may_be_percent_encoded(tmp_path: Path) -> None:
    directory = tmp_path / "a store, 100%"
    open_store(directory.as_uri()).put("run/key", b"x")
    assert (directory / "run" / "key").read_bytes() == b"x"
    assert open_store(f"file://localhost{directory.as_uri()[7:]}").get("run/key").data == b"x"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "runs",
        "/var/lib/deltapost",
        "file://relative/path",
        "file:relative",
        "memory://",
        "memory://a/b",
        "memory://a b",
        "s3://",
        "s3:///prefix",
        "s3://bucket/../other",
        "s3://bucket//a//b",
        "s3://bucket/prefix?region=x",
        "s3://bucket/prefix#x",
        "gs://bucket/prefix",
        "http://[bad",
    ],
)
def test_a_url_that_names_no_store_is_refused_with_the_forms_that_do(url: str) -> None:
    with pytest.raises(ConfigurationError, match="store URL") as caught:
        open_store(url)
    assert caught.value.hint


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match="credentials") as caught:
        open_store(f"s3://key:{SECRET}@bucket/prefix")
    assert SECRET not in str(caught.value)


def test_options_are_for_s3_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="region"):
        open_store(tmp_path.as_uri(), region="eu-central-1")


def test_settings_come_from_the_environment_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAPOST_S3_ENDPOINT", "http://127.0.0.1:8333")
    monkeypatch.setenv("DELTAPOST_S3_REGION", "from-the-environment")
    monkeypatch.setenv("DELTAPOST_S3_CHECKSUMS", "when_required")
    monkeypatch.setenv("DELTAPOST_S3_CA_BUNDLE", "")
    settings = read_settings(region="from-the-argument")
    assert settings.endpoint == "http://127.0.0.1:8333"
    assert settings.region == "from-the-argument"
    assert settings.checksums == "when_required"
    assert settings.ca_bundle is None


def test_secrets_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAPOST_S3_SECRET_ACCESS_KEY", SECRET)
    settings = read_settings(access_key_id="key-id-0123", session_token=SECRET)
    store = open_store("s3://bucket/prefix", access_key_id="key-id-0123")
    for shown in (repr(settings), str(settings), settings.model_dump_json(), repr(store), repr(vars(store))):
        assert SECRET not in shown
        assert "key-id-0123" not in shown


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": f"ftp://{SECRET}"},
        {"checksums": SECRET},
        {"part_bytes": 1024},
        {"attempts": 0},
        {"read_seconds": 0},
        {"ca_bundle": f"/no/such/{SECRET}"},
        {"unknown": SECRET},
        {"access_key_id": SECRET},
        {"secret_access_key": SECRET},
    ],
)
def test_settings_that_cannot_be_used_are_named_without_their_values(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))) as caught:
        open_store("s3://bucket/prefix", **options)
    assert SECRET not in f"{caught.value} {caught.value!r} {caught.value.__cause__}"


def test_an_endpoint_that_boto3_refuses_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigurationError, match="cannot be set up"):
        open_store("s3://bucket/prefix", endpoint="http://a b")


WITHOUT_BOTO3 = """
import sys
sys.modules["boto3"] = None
from deltapost.errors import MissingExtra
from deltapost.stores import open_store
open_store("memory://works")
try:
    open_store("s3://bucket/prefix")
except MissingExtra as error:
    print(error)
"""


def test_without_boto3_the_other_stores_work_and_s3_names_its_extra() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_BOTO3], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "pip install 'deltapost[s3]'" in said
