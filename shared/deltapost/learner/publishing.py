"""Publishing: a delta becomes a payload in the bucket and an envelope on the fragment's stream.

The order is the promise: journal on the own disk, PUT, then XADD. Whatever is lost after the journal is
posted again from it, with the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltapost.adapters import Backend, Model, Value, wrap_model
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import NonFinite, ObjectMissing, SchemaMismatch, StoreError, StoreUnavailable
from deltapost.events import events
from deltapost.learner.journal import Journal, JournalEntry
from deltapost.points import Reach
from deltapost.serialization import TensorBytes, pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import ContributionMessage, sign_message
from deltapost.serialization.names import delta_key, envelope_stream
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore
from deltapost.streams import MessageLog

logger = events(__name__)


@dataclass(frozen=True)
class Receipt:
    """The payload is durable in the bucket and the envelope is on the stream.

    `envelope` identifies the contribution in ledger, records and logs. `repeated`: these bytes were published
    before, and nothing changed. `posted` is False where `publish_due` met a store or a stream that does not
    answer: the contribution is journalled, and posted as soon as they do. `payload_bytes` are uploaded, where
    the delta in fp32 has `dense_bytes`.
    """

    run: str
    learner: str
    fragment: int
    version: int
    envelope: str
    key: str
    payload_bytes: int
    dense_bytes: int
    entry_id: str
    repeated: bool
    posted: bool = True


class Publisher:
    """Encodes, journals, uploads and posts one learner's contributions. Safe to use from several threads."""

    def __init__(
        self,
        store: ObjectStore,
        log: MessageLog,
        plan: RunPlan,
        key: SigningKey,
        learner: str,
        journal: Journal,
        reach: Reach,
    ) -> None:
        self._store = store
        self._log = log
        self._plan = plan
        self._key = key
        self._learner = learner
        self._journal = journal
        self._reach = reach
        self._read_back = False
        #: Stream epoch at the last post of each fragment, read before the XADD.
        self.posted_epochs: dict[int, str | None] = {}

    def encode(self, fragment: int, delta: Mapping[str, Value]) -> bytes:
        """The payload at the run's delta precision. Raises NonFinite, naming the parameter."""
        entries: dict[str, TensorBytes] = {}
        for spec in self._plan.specs(fragment):
            if not delta[spec.name].is_finite():
                raise NonFinite(
                    f"the delta of parameter {spec.name!r} has a NaN or an infinity: nothing was published",
                    hint="the model or its anchor is not finite",
                )
            entries |= self._plan.delta_codec.encode(spec.name, delta[spec.name])
        return pack(entries)

    def publish(self, message: ContributionMessage, payload: bytes) -> Receipt:
        """Journals and posts. After StoreUnavailable or StreamUnavailable the journal posts it later."""
        entry = self._journal.add(sign_message(message, self._key), payload)
        self._reach("learner.journaled")
        return self.post(entry, payload, repeated=False)

    def post(self, entry: JournalEntry, payload: bytes | None = None, *, repeated: bool) -> Receipt:
        """Puts the payload (create-once) and posts the envelope, first time or again."""
        message = entry.message
        key = self._key_of(message)
        if payload is None:
            payload = self._journal.payload(entry)
        envelope = base64.b64encode(entry.signed.frame).decode("ascii")
        self._store.put(key, payload, metadata={"envelope": envelope})
        self._reach("learner.payload_put")
        if not self._read_back:
            self._check_first(key, payload)
        stream = envelope_stream(message.run, message.fragment)
        self.posted_epochs[message.fragment] = self._log.epoch(stream)
        entry_id = self._log.append(stream, entry.signed.frame)
        self._reach("learner.xadd_sent")
        logger.info(
            "contribution_posted",
            extra={
                "run": message.run,
                "learner": message.learner,
                "fragment": message.fragment,
                "version": message.version,
                "envelope": entry.signed.sha256.hex(),
                "bytes": message.payload.size,
                "repeated": repeated,
            },
        )
        return self.receipt(entry, entry_id, repeated=repeated)

    def receipt(self, entry: JournalEntry, entry_id: str, *, repeated: bool, posted: bool = True) -> Receipt:
        message = entry.message
        return Receipt(
            run=message.run,
            learner=message.learner,
            fragment=message.fragment,
            version=message.version,
            envelope=entry.signed.sha256.hex(),
            key=self._key_of(message),
            payload_bytes=message.payload.size,
            dense_bytes=self._plan.dense_bytes(message.fragment),
            entry_id=entry_id,
            repeated=repeated,
            posted=posted,
        )

    def _key_of(self, message: ContributionMessage) -> str:
        return delta_key(
            message.run, message.learner, message.fragment, message.version, message.payload.sha256
        )

    def _check_first(self, key: str, payload: bytes) -> None:
        """Reads a session's first upload back: a store that alters bytes is found at once.

        One that lost it is asked again with the journal's next post. Raises StoreUnavailable, StoreError.
        """
        try:
            found = self._store.get(key, length=len(payload) + 1)
        except ObjectMissing as error:
            raise StoreUnavailable(f"the payload {key!r} was uploaded and is not there") from error
        if found.size != len(payload) or found.data != payload:
            raise StoreError(
                f"the payload {key!r} reads back as {found.size} bytes, not the {len(payload)} uploaded",
                hint="something alters bytes on their way: try DELTAPOST_S3_CHECKSUMS=when_required",
            )
        self._read_back = True


def payload_ref(payload: bytes) -> ObjectRef:
    """Size and SHA-256 of a payload."""
    return ObjectRef(sha256=hashlib.sha256(payload).digest(), size=len(payload))


def delta_values(
    plan: RunPlan,
    fragment: int,
    backend: Backend,
    *,
    delta: Any = None,
    anchor: Any = None,
    theta: Any = None,
) -> dict[str, Value]:
    """The delta of each of the fragment's parameters, given as such or as `anchor` minus `theta`.

    Each is a mapping of names to tensors, arrays or TensorBytes, or a model. More than the fragment's
    parameters may be there. Raises SchemaMismatch naming a parameter that is missing or misshapen, TypeError
    unless exactly one form is given.
    """
    if (delta is None) == (anchor is None and theta is None) or (anchor is None) != (theta is None):
        raise TypeError("give either delta=…, or both anchor=… and theta=…")
    if delta is not None:
        source = _Source(delta, backend, "delta")
        return {spec.name: source.load(spec.name, spec.shape) for spec in plan.specs(fragment)}
    before, after = _Source(anchor, backend, "anchor"), _Source(theta, backend, "theta")
    return {
        spec.name: before.load(spec.name, spec.shape) - after.load(spec.name, spec.shape)
        for spec in plan.specs(fragment)
    }


class _Source:
    def __init__(self, source: Any, backend: Backend, what: str) -> None:
        self._what = what
        self._backend = backend
        self._bytes: Mapping[str, TensorBytes] | None = None
        self._model: Model | None = None
        if isinstance(source, Mapping) and all(isinstance(v, TensorBytes) for v in source.values()):
            self._bytes = source
        else:
            self._model = wrap_model(source)

    def load(self, name: str, shape: tuple[int, ...]) -> Value:
        try:
            if self._bytes is not None:
                value = self._backend.load(self._bytes[name])
            else:
                assert self._model is not None
                value = self._model.load(name)
                if self._model.backend != self._backend:
                    value = self._backend.load(value.to_bytes("F32"))
        except KeyError:
            raise SchemaMismatch(f"{self._what} lacks the parameter {name!r} of the fragment") from None
        if value.shape != shape:
            raise SchemaMismatch(f"{self._what} of {name!r} has shape {value.shape}, expected {shape}")
        return value
