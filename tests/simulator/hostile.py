"""Hostile learners: registered like everybody else, they post whatever the scenario lets them think of.

They hold their own keys and those of nobody else, see every stream, and write below their own prefix only.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from deltapost.errors import DeltapostError
from deltapost.serialization import TensorBytes, pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import (
    ContributionMessage,
    JoinMessage,
    LeaveMessage,
    SignedMessage,
    sign_message,
)
from deltapost.serialization.names import delta_key, envelope_stream, learner_key, members_stream
from deltapost.streams import START
from fixtures.pipeline import RUN, arrays, learner_signing_key
from simulator.scheduling import Process

if TYPE_CHECKING:
    from simulator.world import World

NAME = "mallory"
PAUSES = (0.5, 2.0, 6.0)


class Mallory:
    """One hostile process. Each act is named as in `scenario.HOSTILE`."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._chance = Random(f"hostile {world.scenario.seed}")
        self._key = learner_signing_key(NAME)
        self._number = 0

    def run(self) -> None:
        """Acts until the faults end."""
        self._try(self._join)
        while not self._world.healed:
            self._process.sleep(self._chance.choice(PAUSES))
            kind = self._chance.choice(sorted(self._world.scenario.hostile))
            act: Callable[[], None] = getattr(self, f"_{kind}")
            if self._try(act):
                self._world.boundary.strike(f"hostile.{kind}", "")

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except DeltapostError as error:
            self._world.note(f"{NAME}: {error}")
            return False
        return True

    def _join(self) -> None:
        self._world.store.put(learner_key(RUN, NAME), self._key.public)
        if self._chance.random() < 0.3:
            self._say(JoinMessage(run=RUN, learner=NAME, session=1, counter=0))

    def _fragment(self) -> int:
        return self._chance.randrange(len(self._world.plan.fragments))

    def _payload(self, fragment: int, scale: float = 0.1, change: float | None = None) -> bytes:
        self._number += 1
        values = arrays(1_000_000 + self._number)
        entries = {}
        for spec in self._world.plan.specs(fragment):
            array = np.ascontiguousarray(scale * values[spec.name], np.float32)
            if change is not None:
                array.flat[0] = change
            entries[spec.name] = TensorBytes("F32", spec.shape, array.tobytes())
        return pack(entries)

    def _message(self, fragment: int, version: int, payload: bytes, **claims: Any) -> ContributionMessage:
        return ContributionMessage(
            **{
                "run": RUN,
                "learner": NAME,
                "fragment": fragment,
                "version": version,
                "payload": ObjectRef(sha256=hashlib.sha256(payload).digest(), size=len(payload)),
                "local_step": self._number,
                "steps": 1,
                "tokens": 10,
                "step_seconds": 1.0,
                **claims,
            }
        )

    def _post(self, message: ContributionMessage, payload: bytes | None) -> SignedMessage:
        signed = sign_message(message, self._key)
        if payload is not None:
            key = delta_key(
                message.run, message.learner, message.fragment, message.version, message.payload.sha256
            )
            metadata = {"envelope": base64.b64encode(signed.frame).decode()}
            self._world.store.put(key, payload, metadata=metadata)
        self._world.log.append(envelope_stream(RUN, message.fragment), signed.frame)
        return signed

    def _say(self, message: JoinMessage | LeaveMessage) -> None:
        self._world.log.append(members_stream(RUN), sign_message(message, self._key).frame)

    def _send(self, payload_of: Callable[[int], bytes], ahead: int = 0, **claims: Any) -> None:
        fragment = self._fragment()
        payload = payload_of(fragment)
        version = self._world.history.tip(fragment) + ahead
        self._post(self._message(fragment, version, payload, **claims), payload)

    def _seen(self) -> list[tuple[int, bytes]]:
        """Frames that lie on some fragment's stream, or lay there once."""
        return self._world.frames

    def _replay(self) -> None:
        seen = self._seen()
        if seen:
            fragment, frame = self._chance.choice(seen)
            self._world.log.append(envelope_stream(RUN, fragment), frame)

    def _replay_other_fragment(self) -> None:
        seen = self._seen()
        if seen:
            _, frame = self._chance.choice(seen)
            self._world.log.append(envelope_stream(RUN, self._fragment()), frame)

    def _replay_other_run(self) -> None:
        """What an honest learner signed for another run with the same key."""
        learner = self._chance.choice(self._world.names)
        fragment = self._fragment()
        payload = self._payload(fragment)
        message = self._message(
            fragment, self._world.history.tip(fragment), payload, run="other-run", learner=learner
        )
        frame = sign_message(message, learner_signing_key(learner)).frame
        self._world.log.append(envelope_stream(RUN, fragment), frame)

    def _conflict(self) -> None:
        fragment = self._fragment()
        version = self._world.history.tip(fragment)
        for _ in range(2):
            payload = self._payload(fragment)
            self._post(self._message(fragment, version, payload), payload)

    def _other_counters(self) -> None:
        fragment = self._fragment()
        version, payload = self._world.history.tip(fragment), self._payload(fragment)
        for steps in (0, 2):
            self._post(self._message(fragment, version, payload, steps=steps), payload)

    def _ahead(self) -> None:
        self._send(self._payload, ahead=self._chance.choice((1, 1, 3)))

    def _missing(self) -> None:
        fragment = self._fragment()
        payload = self._payload(fragment)
        self._post(self._message(fragment, self._world.history.tip(fragment), payload), None)

    def _garbage(self) -> None:
        seen = self._seen()
        frame = self._chance.choice(seen)[1] if seen else b"\xc1"
        cut = self._chance.randrange(len(frame) + 1)
        self._world.log.append(envelope_stream(RUN, self._fragment()), frame[:cut])

    def _forged(self) -> None:
        """In an honest learner's name, with her own key."""
        self._send(self._payload, learner=self._chance.choice(self._world.names))

    def _unknown_learner(self) -> None:
        self._send(self._payload, learner=f"nobody-{self._number}")

    def _over_quota(self) -> None:
        fragment = self._fragment()
        size = self._world.plan.max_payload_bytes(fragment)
        version = self._world.history.tip(fragment)
        for _ in range(self._world.plan.max_posted_bytes(fragment) // size + 2):
            self._number += 1
            message = self._message(fragment, version, b"", steps=0)
            announced = ObjectRef(sha256=hashlib.sha256(b"%d" % self._number).digest(), size=size)
            self._post(message.model_copy(update={"payload": announced}), None)

    def _zero_steps(self) -> None:
        self._send(self._payload, steps=0)

    def _outlier(self) -> None:
        self._send(lambda fragment: self._payload(fragment, scale=1e6))

    def _non_finite(self) -> None:
        self._send(lambda fragment: self._payload(fragment, change=float("nan")))

    def _schema(self) -> None:
        self._send(lambda _fragment: pack({"other": TensorBytes("F32", (1,), bytes(4))}))

    def _malformed(self) -> None:
        self._send(lambda fragment: self._payload(fragment)[:-3])

    def _corrupt(self) -> None:
        """The envelope announces another size than what lies there."""
        fragment = self._fragment()
        payload = self._payload(fragment)
        message = self._message(fragment, self._world.history.tip(fragment), payload)
        wrong = ObjectRef(sha256=message.payload.sha256, size=len(payload) + 1)
        self._post(message.model_copy(update={"payload": wrong}), payload)

    def _member_replay(self) -> None:
        entries = self._world.log.read(members_stream(RUN), START, limit=200)
        if entries:
            self._world.log.append(members_stream(RUN), self._chance.choice(entries).data or b"")

    def _member_forged(self) -> None:
        learner = self._chance.choice(self._world.names)
        self._say(LeaveMessage(run=RUN, learner=learner, session=2**40, counter=1))
