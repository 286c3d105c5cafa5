"""What a round of `bench-job` asks of the store between its last upload and its last alignment, asked alone.

One request after the other where the protocol needs the answer first, side by side where it does not; nothing
is computed and nobody else is there. What is left of the round's time is deltapost's and the steps'.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from deltapost.stores import ObjectStore

#: Bytes of a record, and of its attestation, about.
_DOCUMENT_BYTES = 1_500


def store_alone(store: ObjectStore, *, payload_bytes: int, learners: int, samples: int) -> dict[str, float]:
    """Median seconds of each stage. Payload, anchor and outer state have as many bytes as each other."""
    found: dict[str, list[float]] = {}
    with ThreadPoolExecutor(learners) as pool:
        for sample in range(samples):
            prefix = f"alone/{sample}"
            documents = [f"{prefix}/record", f"{prefix}/attestation"]
            large = [f"{prefix}/{name}" for name in ("payload", "anchor", "outer")]
            data = dict.fromkeys(large, os.urandom(payload_bytes)) | dict.fromkeys(
                documents, b"0" * _DOCUMENT_BYTES
            )

            def put(key: str, data: dict[str, bytes] = data) -> object:
                return store.put(key, data[key])

            def get(key: str) -> object:
                return store.get(key).data

            def timed(stage: str, work: Callable[[str], object], keys: Sequence[str]) -> None:
                started = time.perf_counter()
                list(pool.map(work, keys))
                found.setdefault(stage, []).append(time.perf_counter() - started)

            put(large[0])
            timed("fetch the last payload", get, large[:1])
            timed("upload anchor and outer state", put, large[1:])
            timed("read them back", get, large[1:])
            for name, key in zip(("record", "attestation"), documents, strict=True):
                timed(f"write the {name}", put, [key])
                timed(f"read the {name} back", get, [key])
            timed("all learners fetch the anchor", get, [large[1]] * learners)
            for key in data:
                store.delete(key)
    return {stage: round(statistics.median(seconds), 4) for stage, seconds in found.items()}


def last_step_ends(step_seconds: float, learners: int) -> float:
    """Seconds until the last of so many learners ends its step, on average, where each is anywhere in one."""
    return step_seconds * learners / (learners + 1)
