"""AggregatorSettings: everything an aggregator is told, from environment, file and flags."""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated

from pydantic import Field, SecretStr, StringConstraints, field_validator

from deltapost.algorithms.retention import Retain
from deltapost.errors import ConfigurationError
from deltapost.limits import (
    ABANDONED_UPLOAD_SECONDS,
    GARBAGE_SECONDS,
    LEARNER_LEASE_SECONDS,
    LEASE_SECONDS,
    TRANSFER_THREADS,
    WINDOW_BYTES,
    WORKER_THREADS,
)
from deltapost.serialization.names import ID_PATTERN
from deltapost.settings import Settings


class UpkeepSettings(Settings):
    """What an aggregator and `deltapost gc` are both told of keeping a bucket."""

    #: Longest wait for mail, in seconds: how soon an idle fragment sees that announcements were lost.
    poll_seconds: Annotated[float, Field(gt=0, le=30)] = 1.0
    #: How long the inputs and states of rounds are kept: `rounds=K` or `days=D`; empty: for ever.
    retain: str = ""
    #: Seconds without a new part after which an upload that was never completed is aborted.
    abandoned_upload_seconds: Annotated[float, Field(ge=3600)] = ABANDONED_UPLOAD_SECONDS

    @field_validator("retain")
    @classmethod
    def _retention(cls, value: str) -> str:
        if value.strip():
            try:
                Retain.parse(value)
            except ConfigurationError as error:
                raise ValueError(str(error)) from None
        return value.strip()


class CollectorSettings(UpkeepSettings):
    """Settings of `deltapost gc`."""

    store: str
    ledger_url: SecretStr
    #: Needed to let go of rounds only.
    signing_key_file: str | None = None


class AggregatorSettings(UpkeepSettings):
    """Settings of `deltapost aggregator`; each is `DELTAPOST_` and its name in capitals."""

    redis_url: SecretStr
    store: str
    ledger_url: SecretStr
    #: File with the run's aggregator key (`deltapost keys generate FILE`), shared by all aggregators.
    signing_key_file: str
    #: What the ledger and the attestations call this process. Two on one host need two names.
    aggregator_name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = Field(
        default_factory=lambda: socket.gethostname()[:64] or "aggregator"
    )
    #: Comma-separated run ids to serve; `*` serves every run that is announced.
    serve_runs: str = "*"
    #: Seconds a fragment's lease lasts without renewal.
    lease_seconds: Annotated[float, Field(gt=0, le=3600)] = LEASE_SECONDS
    #: Seconds a learner stays live after its last message.
    learner_lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = LEARNER_LEASE_SECONDS
    #: Threads that serve the fragments: each closes one round at a time.
    worker_threads: Annotated[int, Field(ge=1, le=64)] = WORKER_THREADS
    #: Where payloads and states lie that are larger than a megabyte; empty: the system's directory for such.
    spool_directory: str = ""
    #: Bytes of payloads that this process keeps in the spool between intake and close.
    payload_cache_bytes: Annotated[int, Field(ge=0)] = 8 * 1024**3
    #: Bytes of a round's spooled inputs and results that are in memory at once, for each of the threads.
    window_bytes: Annotated[int, Field(ge=1024**2)] = WINDOW_BYTES
    #: Objects fetched and written side by side; 1: one after the other.
    transfer_threads: Annotated[int, Field(ge=1, le=256)] = TRANSFER_THREADS
    #: Seconds between two passes of garbage collection over a run's newest objects.
    garbage_seconds: Annotated[float, Field(gt=0)] = GARBAGE_SECONDS
    #: Where `/healthz` and `/readyz` answer; port 0 turns them off.
    aggregator_health_host: str = "127.0.0.1"
    aggregator_health_port: Annotated[int, Field(ge=0, le=65535)] = 8801

    @field_validator("spool_directory")
    @classmethod
    def _writable(cls, value: str) -> str:
        if value and not os.path.isdir(value):
            raise ValueError(f"{value!r:.200} is no directory")
        return value

    @field_validator("serve_runs")
    @classmethod
    def _run_ids(cls, value: str) -> str:
        for name in value.split(","):
            if name.strip() != "*" and re.fullmatch(ID_PATTERN, name.strip()) is None:
                raise ValueError(f"{name.strip()!r:.80} is neither a run id nor *")
        return value

    def serves(self, run: str) -> bool:
        """Whether this aggregator is allowed to serve the run."""
        return "*" in self._named() or self.names(run)

    def names(self, run: str) -> bool:
        """Whether the run is one of those named: the operator expects it to be served."""
        return run in self._named()

    def named_runs(self) -> list[str]:
        """The runs that the operator named, in order."""
        return sorted(self._named() - {"*"})

    def _named(self) -> set[str]:
        return {name.strip() for name in self.serve_runs.split(",")}
