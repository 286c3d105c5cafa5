"""The parts of one round, each measured alone: download, hash, close, upload and reading back.

What an aggregator does with them at once, or one into the other, is held against their sum. Each part uses
as many threads as it is given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import Contribution, FragmentState
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.plan import RunPlan
from deltapost.serialization import pack, unpack
from deltapost.serialization.messages import ContributionMessage
from deltapost.serialization.names import delta_key, genesis_key
from deltapost.stores import ObjectStore

#: Where what is measured alone is uploaded: no run has such a name.
_SCRATCH = "alone"


class Alone:
    """Measures the parts of a fragment's rounds, round after round, beside whoever really closes them."""

    def __init__(self, store: ObjectStore, plan: RunPlan, fragment: int, *, threads: int) -> None:
        self._store, self._run, self._fragment = store, plan.run, fragment
        self._aggregator = plan.aggregator(fragment, NativeBackend(threads=threads))
        self._pool = ThreadPoolExecutor(threads)
        genesis = plan.manifest.genesis[fragment]
        theta = unpack(store.get(genesis_key(plan.run, fragment, genesis.sha256)).data)
        self._state: FragmentState = genesis_state(plan.specs(fragment), theta)

    def stop(self) -> None:
        self._pool.shutdown()

    def measure(self, messages: Sequence[ContributionMessage]) -> dict[str, float]:
        """Seconds of each part of the round that these contributions make."""
        parts: dict[str, float] = {}
        payloads = self._timed(parts, "download", self._get, [_key(one) for one in messages])
        self._timed(parts, "hash", _sha256, payloads)
        contributions = [
            Contribution(
                one.learner, one.local_step, one.steps, one.tokens, one.step_seconds, one.final, unpack(data)
            )
            for one, data in zip(messages, payloads, strict=True)
        ]
        started = time.perf_counter()
        result = self._aggregator.close_round(self._state, contributions)
        parts["close"] = time.perf_counter() - started
        self._state = result.state
        outputs = [pack(one) for one in (result.update, result.state.theta, result.state.outer) if one]
        self._timed(parts, "hash", _sha256, outputs)
        objects = {f"{_SCRATCH}/{index}": data for index, data in enumerate(outputs)}
        self._timed(parts, "upload", lambda key: self._store.put(key, objects[key]), objects)
        self._timed(parts, "read back", lambda key: self._get(key) == objects[key], objects)
        for key in objects:
            self._store.delete(key)
        return parts

    def _get(self, key: str) -> Any:
        return self._store.get(key).data

    def _timed(
        self, parts: dict[str, float], part: str, work: Callable[[Any], Any], items: Iterable[Any]
    ) -> list[Any]:
        started = time.perf_counter()
        done = list(self._pool.map(work, items))
        parts[part] = parts.get(part, 0.0) + time.perf_counter() - started
        return done


def totals(parts: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of all parts together, and without reading back."""
    return sum(parts.values()), sum(parts.values()) - parts["read back"]


def _key(message: ContributionMessage) -> str:
    return delta_key(message.run, message.learner, message.fragment, message.version, message.payload.sha256)


def _sha256(data: Any) -> bytes:
    return hashlib.sha256(data).digest()
