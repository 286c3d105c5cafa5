"""Oversized, growing and lying objects in a real S3 server: a verdict, without reading what is too much."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from deltapost.ledger.engine import open_ledger
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import SignedMessage, sign_message
from deltapost.serialization.names import delta_key
from deltapost.stores import Blob, open_store
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key
from fixtures.s3 import S3Server
from hostile.measuring import MIB, _peak, _start

MALLORY = "mallory"
PART = bytes(32 * 1024 * 1024)


class Watched:
    """The pipeline's store; sums up what was read of deltas."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.bytes_read = 0

    def get(self, key: str, **keywords: Any) -> Blob:
        blob: Blob = self._inner.get(key, **keywords)
        self.bytes_read += len(blob.data) if "/deltas/" in key else 0
        return blob

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Bucket:
    """A run in a real server, and the way past our own code."""

    pipeline: Pipeline
    server: S3Server
    prefix: str

    def upload(self, key: str, parts: int, *, begin: bytes = b"") -> None:
        """Writes `begin` and so many parts of 32 MiB under the key, over what is there."""
        client, target = self.server.client(), {"Bucket": self.server.bucket, "Key": f"{self.prefix}/{key}"}
        upload = client.create_multipart_upload(**target)["UploadId"]
        tags = [
            client.upload_part(
                **target, UploadId=upload, PartNumber=number, Body=begin + PART if number == 1 else PART
            )["ETag"]
            for number in range(1, parts + 1)
        ]
        listed = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        client.complete_multipart_upload(**target, UploadId=upload, MultipartUpload={"Parts": listed})

    def announce(self, payload: bytes, size: int) -> SignedMessage:
        message = self.pipeline.message(MALLORY, payload)
        message = message.model_copy(update={"payload": ObjectRef(sha256=message.payload.sha256, size=size)})
        signed = sign_message(message, learner_signing_key(MALLORY))
        self.pipeline.append(signed)
        return signed

    def key(self, signed: SignedMessage) -> str:
        message: Any = signed.message
        return delta_key(RUN, MALLORY, 0, 0, message.payload.sha256)


@pytest.fixture
def bucket(migrated_sqlite_url: str, seaweed_s3: S3Server) -> Iterator[Bucket]:
    prefix = f"oversize/{secrets.token_hex(8)}"
    ledger = open_ledger(migrated_sqlite_url)
    store = open_store(f"s3://{seaweed_s3.bucket}/{prefix}", **seaweed_s3.options)
    pipeline = Pipeline(ledger, store=store)
    pipeline.register(MALLORY)
    pipeline.store = Watched(store)
    yield Bucket(pipeline, seaweed_s3, prefix)
    ledger.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [1, pytest.param(32, marks=pytest.mark.slow)], ids=["32MiB", "1GiB"])
def test_oversized_objects_are_refused_without_being_read(bucket: Bucket, parts: int) -> None:
    pipeline = bucket.pipeline
    fits = pipeline.plan.max_payload_bytes(0)
    lying = bucket.announce(b"lying", 1_000)
    filling = bucket.announce(b"filling", fits)
    above = bucket.announce(b"above", fits + 1)
    whole = bucket.announce(b"whole", parts * len(PART))
    for signed in (lying, filling, above, whole):
        bucket.upload(bucket.key(signed), parts)
    healthy(pipeline)
    before = _start()

    pipeline.run_to(1)

    assert pipeline.record(1).verdicts()[lying.sha256] == "corrupt"
    assert pipeline.record(1).verdicts()[filling.sha256] == "corrupt"
    assert pipeline.record(1).verdicts()[above.sha256] == "too_large"
    assert pipeline.record(1).over_quota == {MALLORY: 1}
    assert [p.learner for p in pipeline.record(1).participants] == sorted(LEARNERS)
    watched: Any = pipeline.store
    assert watched.bytes_read < 2 * fits
    assert (_peak() - before) / MIB < 64


def test_an_object_that_grows_after_its_envelope_is_corrupt(bucket: Bucket) -> None:
    pipeline = bucket.pipeline
    payload = pipeline.payload(arrays(9))
    growing = bucket.announce(payload, len(payload))
    pipeline.put(pipeline.message(MALLORY, payload), payload)
    bucket.upload(bucket.key(growing), 1, begin=payload)
    healthy(pipeline)

    pipeline.run_to(1)

    assert pipeline.record(1).verdicts()[growing.sha256] == "corrupt"
    watched: Any = pipeline.store
    assert watched.bytes_read < 8 * len(payload)
