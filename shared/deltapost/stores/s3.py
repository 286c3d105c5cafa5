"""Objects in an S3 bucket, each created once by a conditional write.

What is assumed of the server: `If-None-Match: *` on PutObject and CompleteMultipartUpload, reads that see
what was written, ranges. `stores.probe` shows whether the first holds. What is not assumed: that a reply
arrives. A write that succeeded and lost its reply is sent again by boto3 and then refused with 412; so 412
and 409 only mean that the object must be read: the same bytes are success, others ObjectConflict.

SeaweedFS 4.48 holds the condition on PutObject, and on CompleteMultipartUpload only against objects that are
there already: of uploads that complete at once, several succeed and the last one stays. So a key that two may
write with different bytes holds less than a part (a record does); larger ones end in their content's hash.

Failure modes. Time-outs, 429, 5xx and lost connections, after boto3's own attempts: StoreUnavailable. 403:
AccessDenied; of a read NotReadable, for without the right to list, S3 says that of missing objects too. A
missing bucket: StoreError
(HEAD has no body to say so, and reads as ObjectMissing). A failed upload's parts are aborted; after kill -9
they stay until somebody aborts them: `unfinished` and `abort`, or a bucket's life-cycle rule.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from deltapost.errors import NotReadable, ObjectMissing, StoreUnavailable
from deltapost.stores import Blob, ObjectInfo, UnfinishedUpload
from deltapost.stores.keys import check_key, check_metadata, check_prefix, check_range, conflict
from deltapost.stores.reading import PIECE_BYTES, Body, Sink, pieces
from deltapost.stores.s3_client import s3_client  # first: it says which extra is missing
from deltapost.stores.s3_errors import PastTheEnd, RequestFailure, WriteRefused, translate
from deltapost.stores.settings import StoreSettings

#: Seconds before a write that was refused, and whose key then held nothing, is started anew.
_WRITE_PAUSES: Final = (0.1, 0.2, 0.4, 0.8, 1.6)


class S3Store:
    """An ObjectStore in `bucket`, below `prefix` (which may be empty)."""

    def __init__(self, bucket: str, prefix: str, settings: StoreSettings) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._settings = settings
        s3_client(settings)  # settings that boto3 cannot use are refused here, not at the first request

    def __repr__(self) -> str:
        return f"S3Store(s3://{self._bucket}/{self._prefix})"

    def put(self, key: str, data: bytes | memoryview, *, metadata: Mapping[str, str] | None = None) -> bool:
        target = self._target(key)
        described = check_metadata(metadata)
        write = self._write_parts if len(data) > self._settings.part_bytes else self._write_whole
        for pause in _WRITE_PAUSES:
            try:
                with self._reported("write", key):
                    write(target, data, described)
                return True
            except WriteRefused:
                found = self._look(key, data)
                if found is None:
                    return False
            time.sleep(pause)
        if isinstance(found, NotReadable):
            raise found
        raise StoreUnavailable(f"writes of the key {key!r} were refused, and nothing is there, in {self!r}")

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        check_range(offset, length)
        target = self._target(key)
        if offset or length is not None:
            target["Range"] = f"bytes={offset}-" + (
                "" if length is None else str(offset + max(length, 1) - 1)
            )
        try:
            with self._reported("read", key):
                reply = s3_client(self._settings).get_object(**target)
                with contextlib.closing(reply["Body"]) as body:
                    return self._blob(key, reply, body, offset, length)
        except PastTheEnd:
            found = self.head(key)
            return Blob(b"", found.size, found.metadata)

    def read(self, key: str, sink: Sink, *, length: int) -> ObjectInfo:
        target = self._target(key)
        target["Range"] = f"bytes=0-{max(length, 1) - 1}"
        try:
            with self._reported("read", key):
                reply = s3_client(self._settings).get_object(**target)
                with contextlib.closing(reply["Body"]) as body:
                    size = _whole_size(reply)
                    left = min(length, size)
                    while left and (piece := body.read(min(left, PIECE_BYTES))):
                        left -= len(piece)
                        sink(piece)
        except PastTheEnd:
            return self.head(key)
        if left:
            raise StoreUnavailable(f"the read of the key {key!r} in {self!r} ended {left} bytes too early")
        return ObjectInfo(key, size, _metadata(reply))

    def head(self, key: str) -> ObjectInfo:
        target = self._target(key)
        with self._reported("head", key):
            reply = s3_client(self._settings).head_object(**target)
        return ObjectInfo(key, reply["ContentLength"], _metadata(reply))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._listed(prefix)

    def delete(self, key: str) -> None:
        target = self._target(key)
        with contextlib.suppress(ObjectMissing), self._reported("delete", key):
            s3_client(self._settings).delete_object(**target)

    def unfinished(self, prefix: str, *, idle_seconds: float) -> Iterator[UnfinishedUpload]:
        check_prefix(prefix)
        client, wanted = s3_client(self._settings), self._prefix + prefix
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=wanted)
        with self._reported("list uploads", prefix):
            found = [
                (upload, _server_time(page, upload["Initiated"]))
                for page in pages
                for upload in page.get("Uploads", ())
                if upload["Key"].startswith(wanted)
            ]
        for upload, now in sorted(found, key=lambda item: (item[0]["Key"], item[0]["UploadId"])):
            key, name = upload["Key"].removeprefix(self._prefix), upload["UploadId"]
            idle = (now - upload["Initiated"]).total_seconds()
            if idle >= idle_seconds:  # old; but a slow one is alive as long as parts still come
                idle = min(idle, self._since_last_part(key, name, idle))
            if idle >= idle_seconds:
                yield UnfinishedUpload(key, name, idle)

    def abort(self, upload: UnfinishedUpload) -> None:
        target = self._target(upload.key or "")
        with contextlib.suppress(WriteRefused, ObjectMissing), self._reported("abort", upload.key or ""):
            s3_client(self._settings).abort_multipart_upload(**target, UploadId=upload.upload)

    def _since_last_part(self, key: str, upload: str, otherwise: float) -> float:
        """Seconds, by the server's clock, since a part of the upload was written; 0.0 when it just ended."""
        pages = s3_client(self._settings).get_paginator("list_parts")
        newest: float = otherwise
        try:
            with self._reported("list parts", key):
                for page in pages.paginate(**self._target(key), UploadId=upload):
                    for part in page.get("Parts", ()):
                        now = _server_time(page, part["LastModified"])
                        newest = min(newest, (now - part["LastModified"]).total_seconds())
        except (WriteRefused, ObjectMissing):  # completed or aborted meanwhile
            return 0.0
        return newest

    def _target(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _write_whole(
        self, target: dict[str, Any], data: bytes | memoryview, metadata: dict[str, str]
    ) -> None:
        body = _body(data)
        s3_client(self._settings).put_object(**target, Body=body, Metadata=metadata, IfNoneMatch="*")

    def _write_parts(
        self, target: dict[str, Any], data: bytes | memoryview, metadata: dict[str, str]
    ) -> None:
        client, size = s3_client(self._settings), self._settings.part_bytes
        # Left to itself, boto3 sends CRC-32 with parts of an upload that was not opened for it.
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._settings.checksums == "when_supported" else {}
        upload_id = client.create_multipart_upload(**target, Metadata=metadata, **algorithm)["UploadId"]
        try:
            parts = []
            for number, offset in enumerate(range(0, len(data), size), start=1):
                body = _body(memoryview(data)[offset : offset + size])
                reply = client.upload_part(
                    **target, UploadId=upload_id, PartNumber=number, Body=body, **algorithm
                )
                sums = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
                parts.append({"PartNumber": number, **sums})
            client.complete_multipart_upload(
                **target, UploadId=upload_id, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )
        except BaseException as failure:
            try:
                client.abort_multipart_upload(**target, UploadId=upload_id)
            except RequestFailure as error:
                failure.add_note(f"the upload's parts may be left over: {type(error).__name__}")
            raise

    def _look(self, key: str, data: bytes | memoryview) -> ObjectMissing | NotReadable | None:
        """None when the object holds exactly `data`; the error when it is not there, or not readable."""
        try:
            self._compare(key, data)
        except (ObjectMissing, NotReadable) as error:
            return error
        return None

    def _compare(self, key: str, data: bytes | memoryview) -> None:
        """ObjectConflict unless the object holds exactly `data`; one of another size is not downloaded."""
        with self._reported("read", key):
            reply = s3_client(self._settings).get_object(**self._target(key))
            with contextlib.closing(reply["Body"]) as body:
                if reply["ContentLength"] != len(data):
                    raise conflict(key, data, found_size=reply["ContentLength"])
                digest, wanted = hashlib.sha256(), hashlib.sha256()
                for chunk in body.iter_chunks(PIECE_BYTES):
                    digest.update(chunk)
        for piece in pieces(data):
            wanted.update(piece)
        if digest.digest() != wanted.digest():
            raise conflict(key, data, found_size=len(data), found_sha256=digest.hexdigest())

    def _blob(self, key: str, reply: dict[str, Any], body: Any, offset: int, length: int | None) -> Blob:
        size = _whole_size(reply)
        # Without a range: the whole object was asked for, or the server ignores ranges.
        skipped = 0 if "ContentRange" in reply else offset
        wanted = max(size - offset, 0) if length is None else min(length, max(size - offset, 0))
        data = body.read(skipped + wanted)[skipped:] if wanted else b""
        if len(data) != wanted:
            raise StoreUnavailable(
                f"the read of the key {key!r} in {self!r} gave {len(data)} bytes of {wanted}"
            )
        return Blob(data, size, _metadata(reply))

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        pages = (
            s3_client(self._settings)
            .get_paginator("list_objects_v2")
            .paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
        )
        with self._reported("list", prefix):
            found = [(item["Key"], item["Size"]) for page in pages for item in page.get("Contents", ())]
        # SeaweedFS lists `a/b` before `a-b`; so the order is ours, at some 200 bytes of memory an object.
        for key, size in sorted(found):
            yield ObjectInfo(key.removeprefix(self._prefix), size)

    @contextlib.contextmanager
    def _reported(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except RequestFailure as error:
            doing = f"{verb} of s3://{self._bucket}/{self._prefix}{key}"
            raise translate(error, doing, key, reading=verb in ("read", "head")) from error


def _server_time(reply: dict[str, Any], otherwise: datetime) -> datetime:
    """When the server answered, by its own clock; `otherwise` where it does not say: nothing is old then."""
    said = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(said) if said else otherwise


def _whole_size(reply: dict[str, Any]) -> int:
    """Bytes of the whole object, of which a range was asked for."""
    if "ContentRange" in reply:
        return int(reply["ContentRange"].rpartition("/")[2])
    size: int = reply["ContentLength"]
    return size


def _body(data: bytes | memoryview) -> bytes | Body:
    return data if isinstance(data, bytes) else Body(data)


def _metadata(reply: dict[str, Any]) -> dict[str, str]:
    # HTTP header names have no case, and servers differ in the one they give back.
    return {name.lower(): value for name, value in reply.get("Metadata", {}).items()}
