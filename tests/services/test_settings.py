"""Settings come from arguments, environment and file, in that order, and never show a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltapost.errors import ConfigurationError
from deltapost.learner.settings import LearnerSettings
from deltapost.settings import Settings, reveal
from deltapost_aggregator.settings import AggregatorSettings
from deltapost_ledger.settings import LedgerSettings

SECRET = "hunter2"
REDIS = f"redis://user:{SECRET}@localhost:6379/0"
LEDGER = f"postgresql://user:{SECRET}@localhost/ledger"

GIVEN = {"redis_url": REDIS, "store": "memory://x", "ledger_url": LEDGER, "signing_key_file": "key"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("DELTAPOST_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("settings", [AggregatorSettings, LearnerSettings, LedgerSettings])
def test_a_password_in_an_address_never_shows(settings: type[Settings]) -> None:
    read = settings.read(**{name: value for name, value in GIVEN.items() if name in settings.model_fields})

    assert SECRET not in repr(read)
    assert SECRET not in str(read)
    assert SECRET not in read.model_dump_json()


def test_a_setting_is_taken_from_the_argument_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deltapost.toml"
    file.write_text(
        f'redis_url = "{REDIS}"\nledger_url = "{LEDGER}"\nsigning_key_file = "from-file"\n'
        'store = "file:///from-file"\naggregator_name = "from-file"\nserve_runs = "one, two"\n'
    )
    monkeypatch.setenv("DELTAPOST_CONFIG", str(file))
    monkeypatch.setenv("DELTAPOST_STORE", "file:///from-environment")
    monkeypatch.setenv("DELTAPOST_AGGREGATOR_NAME", "from-environment")

    read = AggregatorSettings.read(aggregator_name="from-argument")

    assert read.aggregator_name == "from-argument"
    assert read.store == "file:///from-environment"
    assert read.signing_key_file == "from-file"
    assert reveal(read.redis_url) == REDIS
    assert [read.serves(run) for run in ("one", "two", "three")] == [True, True, False]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"redis_url": None}, "DELTAPOST_REDIS_URL"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lease_seconds": SECRET}, "lease_seconds"),
        ({"aggregator_health_port": 70_000}, "aggregator_health_port"),
        ({"aggregator_name": "a b"}, "aggregator_name"),
    ],
)
def test_a_wrong_or_missing_setting_is_named_with_its_variable_and_its_value_is_not_shown(
    wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        AggregatorSettings.read(**{**GIVEN, **wrong})

    assert SECRET not in str(caught.value)


def test_a_config_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAPOST_CONFIG", "/nowhere/deltapost.toml")

    with pytest.raises(ConfigurationError, match=r"/nowhere/deltapost\.toml"):
        AggregatorSettings.read(**GIVEN)


def test_a_config_file_that_is_no_toml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deltapost.toml"
    file.write_text("redis_url = \n")
    monkeypatch.setenv("DELTAPOST_CONFIG", str(file))

    with pytest.raises(ConfigurationError, match=r"deltapost\.toml"):
        AggregatorSettings.read(**GIVEN)
