"""Real servers and real aggregator processes for a benchmark, in a directory that goes with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

# The servers are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from crowd import AGGREGATOR_KEY

from deltapost.ledger.engine import open_ledger
from deltapost.ledger.revisions import migrate
from deltapost.stores import ObjectStore, open_store
from deltapost.streams import MessageLog, open_log
from fixtures.postgres import PostgresServer
from fixtures.seaweed import running_seaweed
from fixtures.valkey import start_valkey


@dataclass
class Parts:
    """Where everything is, and what an aggregator process is told about it."""

    directory: Path
    redis_url: str
    ledger_url: str
    store_url: str
    store: ObjectStore
    log: MessageLog
    environment: dict[str, str] = field(default_factory=dict)

    def aggregator(self, name: str, program: list[str], **settings: str) -> subprocess.Popen[bytes]:
        """A started aggregator process; its log is `NAME.log` in the directory."""
        variables = {
            "DELTAPOST_REDIS_URL": self.redis_url,
            "DELTAPOST_STORE": self.store_url,
            "DELTAPOST_LEDGER_URL": self.ledger_url,
            "DELTAPOST_SIGNING_KEY_FILE": str(self.directory / "aggregator.key"),
            "DELTAPOST_AGGREGATOR_HEALTH_PORT": "0",
            "DELTAPOST_AGGREGATOR_NAME": name,
            **{f"DELTAPOST_{each.upper()}": value for each, value in settings.items()},
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                program, env={**os.environ, **self.environment, **variables}, stdout=log, stderr=log
            )


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a process in order."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def running(*, s3: bool, postgres: bool, metrics_port: int | None = None) -> Iterator[Parts]:
    """Valkey, SeaweedFS or a directory, Postgres or SQLite: all empty, all stopped at the end.

    `metrics_port`: where SeaweedFS tells what it was asked.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltapost-bench-")))
        valkey = start_valkey()
        stack.callback(valkey.stop)
        environment: dict[str, str] = {}
        if s3:
            told = {} if metrics_port is None else {"metricsPort": metrics_port}
            server = stack.enter_context(running_seaweed(**told))
            store_url, environment = f"s3://{server.bucket}/load", server.environment
            store = open_store(store_url, **server.options)
        else:
            store_url = (directory / "store").as_uri()
            store = open_store(store_url)
        if postgres:
            database = PostgresServer()
            stack.callback(database.stop)
            ledger_url = database.url(database.create())
        else:
            ledger_url = f"sqlite:///{directory / 'ledger.db'}"
        ledger = open_ledger(ledger_url)
        migrate(ledger)
        ledger.close()
        AGGREGATOR_KEY.save(directory / "aggregator.key")
        log = open_log(valkey.connection_url)
        stack.callback(log.close)
        yield Parts(directory, valkey.connection_url, ledger_url, store_url, store, log, environment)
