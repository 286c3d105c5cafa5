"""An aggregator whose every store call takes longer by SECONDS: `python slow_aggregator.py SECONDS`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from deltapost.cli.logs import log_to_stderr
from deltapost.stores import Blob, ObjectInfo, ObjectStore
from deltapost_aggregator.service import AggregatorService, open_services
from deltapost_aggregator.settings import AggregatorSettings


class SlowStore:
    """Another store, from far away."""

    def __init__(self, store: ObjectStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def put(self, key: str, data: bytes, *, metadata: Mapping[str, str] | None = None) -> bool:
        time.sleep(self._seconds)
        return self._store.put(key, data, metadata=metadata)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        time.sleep(self._seconds)
        return self._store.get(key, offset=offset, length=length)

    def head(self, key: str) -> ObjectInfo:
        time.sleep(self._seconds)
        return self._store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        time.sleep(self._seconds)
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        time.sleep(self._seconds)
        self._store.delete(key)


def main() -> None:
    log_to_stderr("text")
    services = open_services(AggregatorSettings.read())
    service = AggregatorService(replace(services, store=SlowStore(services.store, float(sys.argv[1]))))
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    service.run()


if __name__ == "__main__":
    main()
