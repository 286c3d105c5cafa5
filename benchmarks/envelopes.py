"""Envelopes that wait: a run whose learners have all posted, in a real stream, before anybody reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from crowd import AGGREGATOR_KEY
from parts import Parts

from deltapost.adapters.native import ArrayModel, NativeBackend
from deltapost.algorithms.diloco import DiLoCo
from deltapost.algorithms.partition import ByBytes
from deltapost.algorithms.plan import RunPlan
from deltapost.learner.creating import create_run
from deltapost.ledger import runs
from deltapost.ledger.engine import Ledger
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import (
    ContributionMessage,
    JoinMessage,
    SignedMessage,
    sign_message,
)
from deltapost.serialization.names import envelope_stream, learner_key
from deltapost.serialization.signing import SigningKey
from deltapost.serialization.verdicts import Verdict
from deltapost.stores.memory import MemoryStore
from deltapost.stores.registry import register
from deltapost_aggregator import intake
from deltapost_aggregator.context import RunContext, Services
from deltapost_aggregator.payloads import PayloadChecks
from deltapost_aggregator.settings import AggregatorSettings

CREATOR = SigningKey(hashlib.sha256(b"creator").digest())
#: What a training loop reports beside the loss.
METRICS = {"grad_norm": 0.7312, "learning_rate": 3e-4, "tokens_per_second": 13_107.2, "inner_loss": 2.4417}
ELEMENTS = 4_096


@dataclass(frozen=True)
class Waiting:
    """A served run. Its learners are live, their keys known; what they sign can be posted when it is time."""

    parts: Parts
    ledger: Ledger
    plan: RunPlan
    context: RunContext
    learners: Sequence[str]

    def signed(self, fragment: int) -> list[bytes]:
        """One envelope of each learner for the fragment's open round."""
        return [_envelope(self.plan.run, learner, fragment).frame for learner in self.learners]

    def post(self, fragment: int, frames: Sequence[bytes]) -> None:
        """They wait in the fragment's stream."""
        for frame in frames:
            self.parts.log.append(envelope_stream(self.plan.run, fragment), frame)


def _key(learner: str) -> SigningKey:
    return SigningKey(hashlib.sha256(learner.encode()).digest())


def _envelope(run: str, learner: str, fragment: int) -> SignedMessage:
    message = ContributionMessage(
        run=run,
        learner=learner,
        fragment=fragment,
        version=0,
        payload=ObjectRef(
            sha256=hashlib.sha256(f"{learner}/{fragment}".encode()).digest(), size=4 * ELEMENTS
        ),
        local_step=128,
        steps=128,
        tokens=128 * 4_096,
        step_seconds=0.3125,
        loss=2.5128,
        metrics=METRICS,
    )
    return sign_message(message, _key(learner))


def waiting(
    parts: Parts, ledger: Ledger, run: str, *, fragments: int, learners: int, registered: bool
) -> Waiting:
    """A run that is served and whose learners are known; nothing is posted yet."""
    store = MemoryStore()
    # One more learner than are waited for: it never posts, so that no round of them is ever complete.
    config = DiLoCo(
        sync_every=fragments, fragments=fragments, in_flight=1, quorum_size=learners + 1, grace_seconds=0.0
    )  # fmt: skip
    model = ArrayModel({f"p{number:04d}": np.ones(ELEMENTS, np.float32) for number in range(fragments)})
    plan = create_run(
        store, run, model, config, CREATOR, partition=ByBytes(),
        admission="registered" if registered else "open", aggregator_key=AGGREGATOR_KEY.public,
    )  # fmt: skip
    names = [f"learner-{number:04d}" for number in range(learners)]
    runs.admit(ledger, plan.manifest)
    for name in names:
        public = _key(name).public
        if registered:
            register(store, plan.manifest, CREATOR, "add", name, public, from_version=0)
        else:
            store.put(learner_key(run, name), public)
        # What a learner's first message costs is not measured: its keys are known.
        runs.add_learner(ledger, run, name, public)
    settings = AggregatorSettings(
        redis_url=parts.redis_url,
        store="memory://",
        ledger_url=parts.ledger_url,
        signing_key_file=str(parts.directory / "aggregator.key"),
        aggregator_name=run,
    )
    services = Services(settings, store, parts.log, ledger, AGGREGATOR_KEY, NativeBackend())
    context = RunContext(services, plan)
    context.keys.look()
    context.members(
        [JoinMessage(run=run, learner=name, session=1, counter=0) for name in [*names, "learner-silent"]],
        0.0,
        whole=True,
    )
    return Waiting(parts, ledger, plan, context, names)


class _NoPayloads(PayloadChecks):
    """Every payload is there and in order, at no cost."""

    def begin(self, *_: object) -> None:
        pass

    def check(self, _signed: SignedMessage) -> tuple[Verdict, str]:
        return "accepted", ""


@contextmanager
def free_payloads() -> Iterator[None]:
    """Payloads cost nothing: neither their GETs nor their hashes and norms."""
    with patch.object(intake, "PayloadChecks", _NoPayloads):
        yield


@contextmanager
def signatures_believed(believed: bool) -> Iterator[None]:
    """Every signature counts as good, unchecked: what is left of a rate is what the rest costs."""
    if not believed:
        yield
        return
    with patch("deltapost.serialization.messages.verify", lambda *_, **__: None):
        yield
