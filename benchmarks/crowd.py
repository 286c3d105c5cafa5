"""Simulated learners: what they post is real (signed, uploaded, appended), what they trained is not."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from deltapost.adapters.native import NativeBackend, NativeValue
from deltapost.algorithms.diloco import DiLoCo
from deltapost.algorithms.partition import ByBytes
from deltapost.algorithms.plan import RunPlan
from deltapost.learner.creating import create_run
from deltapost.limits import MAX_MEMBERS_ENTRIES
from deltapost.serialization import ParameterSpec, TensorBytes, pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import (
    AliveMessage,
    CommitMessage,
    ContributionMessage,
    JoinMessage,
    LeaveMessage,
    PassMessage,
    RunMessage,
    SignedMessage,
    read_message,
    sign_message,
)
from deltapost.serialization.names import (
    RUNS_STREAM,
    commits_stream,
    delta_key,
    envelope_stream,
    learner_key,
    members_stream,
)
from deltapost.serialization.signing import SigningKey
from deltapost.serialization.tensor import DType
from deltapost.stores import ObjectStore
from deltapost.streams import START, MessageLog, position_key

RUN = "bench"
AGGREGATOR_KEY = SigningKey(hashlib.sha256(b"aggregator").digest())


def _key(name: str) -> SigningKey:
    return SigningKey(hashlib.sha256(name.encode()).digest())


class DrawnModel:
    """A model whose parameters are drawn whenever they are asked for: none is ever held. See `Model`."""

    backend = NativeBackend()

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._specs = {name: ParameterSpec(name, "F32", shape) for name, shape in sorted(shapes.items())}

    def specs(self) -> list[ParameterSpec]:
        return list(self._specs.values())

    def load(self, name: str) -> NativeValue:
        random = np.random.default_rng(list(name.encode()))
        shape = self._specs[name].shape
        return self.backend.load(TensorBytes("F32", shape, _drawn("F32", shape, random)))

    def assign(self, name: str, tensor: TensorBytes) -> None:
        raise NotImplementedError(f"{name!r} is drawn, not kept")


def _drawn(dtype: DType, shape: tuple[int, ...], random: np.random.Generator) -> bytes:
    """Numbers of about a unit's size, in the bytes of an entry."""
    match dtype:
        case "F32":
            return random.standard_normal(shape, np.float32).tobytes()
        case "F4":
            return random.bytes(prod(shape) // 2)
        case "F8_E8M0":
            return random.integers(124, 128, shape, np.uint8).tobytes()
    raise ValueError(f"nobody draws {dtype}")


class Crowd:
    """A run with its learners, all of them in this process."""

    def __init__(
        self,
        store: ObjectStore,
        log: MessageLog,
        config: DiLoCo,
        *,
        learners: int,
        parameters: int,
        tensors: int = 1,
    ) -> None:
        """Creates the run, whose fragments have `tensors` tensors of `parameters` elements each."""
        self.store, self.log, self.config = store, log, config
        names = [f"p{number:04d}" for number in range(config.fragments * tensors)]
        self.plan: RunPlan = create_run(
            store,
            RUN,
            DrawnModel(dict.fromkeys(names, (parameters,))),
            config,
            _key("creator"),
            partition=ByBytes(),
            aggregator_key=AGGREGATOR_KEY.public,
        )
        self.learners = [f"learner-{number:04d}" for number in range(learners)]
        self.keys = {learner: _key(learner) for learner in self.learners}
        self.versions = [0] * config.fragments
        self.announced: dict[tuple[int, int], float] = {}
        #: Envelopes posted, by hash: fragment and entry id.
        self.posted: dict[bytes, tuple[int, str]] = {}
        self._counters: dict[str, int] = {}
        self._lock = threading.Lock()
        self._position = START

    def register(self) -> None:
        """Keys into the bucket, everybody joins, the run is announced."""
        for learner in self.learners:
            self.store.put(learner_key(RUN, learner), self.keys[learner].public)
            self.say(learner, JoinMessage)
        first = self.keys[self.learners[0]]
        message = RunMessage(run=RUN, manifest=self.plan.manifest_sha256, public_key=first.public)
        self.log.append(RUNS_STREAM, sign_message(message, first).frame)

    def say(self, learner: str, kind: Callable[..., Any], **fields: Any) -> None:
        """A member's message with its next counter."""
        with self._lock:
            counter = self._counters.get(learner, -1) + 1
            self._counters[learner] = counter
        message = kind(run=RUN, learner=learner, session=1, counter=counter, **fields)
        frame = sign_message(message, self.keys[learner]).frame
        self.log.append(members_stream(RUN), frame, max_length=MAX_MEMBERS_ENTRIES)

    def alive(self, learner: str) -> None:
        self.say(learner, AliveMessage, local_step=self._counters[learner] + 1)

    def leave(self, learner: str) -> None:
        self.say(learner, LeaveMessage)

    def passes(self, learner: str, fragment: int, version: int) -> None:
        self.say(learner, PassMessage, fragment=fragment, version=version)

    def publish(self, learner: str, fragment: int, version: int) -> None:
        """Uploads a delta of its own and appends its envelope."""
        self.post(self.upload(learner, fragment, version))

    def upload(self, learner: str, fragment: int, version: int) -> SignedMessage:
        """Puts a delta of its own where its envelope, which nobody has yet, says that it is."""
        payload = self._payload(learner, fragment, version)
        reference = ObjectRef(sha256=hashlib.sha256(payload).digest(), size=len(payload))
        message = ContributionMessage(
            run=RUN,
            learner=learner,
            fragment=fragment,
            version=version,
            payload=reference,
            local_step=version + 1,
            steps=1,
            tokens=1_000,
            step_seconds=1.0,
            loss=2.5,
        )
        signed = sign_message(message, self.keys[learner])
        key = delta_key(RUN, learner, fragment, version, reference.sha256)
        self.store.put(key, payload, metadata={"envelope": base64.b64encode(signed.frame).decode()})
        return signed

    def post(self, signed: SignedMessage) -> str:
        """Appends an envelope; the id of its entry."""
        message = signed.message
        assert isinstance(message, ContributionMessage)
        entry = self.log.append(envelope_stream(RUN, message.fragment), signed.frame)
        with self._lock:
            self.posted[signed.sha256] = (message.fragment, entry)
        return entry

    def _payload(self, learner: str, fragment: int, version: int) -> bytes:
        seed = hashlib.sha256(f"{learner}/{fragment}/{version}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(seed[:8]))
        kinds = self.plan.expected_entries(fragment)
        return pack({name: TensorBytes(*kind, _drawn(*kind, random)) for name, kind in kinds.items()})

    def follow(self, wait_seconds: float) -> list[tuple[int, int]]:
        """Reads announced commits; returns fragment and version of those that are new."""
        found = []
        for entry in self.log.read(
            commits_stream(RUN), self._position, limit=1_000, wait_seconds=wait_seconds
        ):
            self._position = entry.id
            message = read_message(entry.data or b"").message
            if isinstance(message, CommitMessage) and message.version > self.versions[message.fragment]:
                self.versions[message.fragment] = message.version
                self.announced[message.fragment, message.version] = position_key(entry.id)[0] / 1_000
                found.append((message.fragment, message.version))
        return found


def until(there: Callable[[], bool], what: str, *, seconds: float) -> None:
    """Waits until `there()`; raises TimeoutError, which names `what`."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds} s")
        time.sleep(0.05)
