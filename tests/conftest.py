"""Servers that tests of every part share; each module starts its server when the first test asks for it."""

from __future__ import annotations

import pytest

pytest_plugins = [
    "fixtures.certificates",
    "fixtures.playing",
    "fixtures.postgres",
    "fixtures.processes",
    "fixtures.s3",
    "fixtures.seaweed",
    "fixtures.served",
    "fixtures.fleet",
    "fixtures.training",
    "fixtures.valkey",
    "fixtures.rights",  # last: it imports from those before it
]

#: What these files test lies above the ledger: on Postgres they run in `make test-all` only.
SLOW_ON_POSTGRES = (
    "aggregator/test_envelope_kinds.py",
    "aggregator/test_failing_store.py",
    "aggregator/test_fleet.py",
    "aggregator/test_fleet_names.py",
    "aggregator/test_forgotten_announcements.py",
    "aggregator/test_vouching.py",
    "aggregator/test_waiting.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "postgresql" in item.name and str(item.path).endswith(SLOW_ON_POSTGRES):
            item.add_marker(pytest.mark.slow)
