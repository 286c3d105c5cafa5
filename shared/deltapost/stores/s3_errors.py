"""What S3 and boto3 say, in the error tree's words, without a request's headers or signature."""

from __future__ import annotations

from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)

from deltapost.errors import (
    AccessDenied,
    ConfigurationError,
    DeltapostError,
    NotReadable,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
)

#: What a boto3 call raises.
RequestFailure: Final = (BotoCoreError, ClientError)

_CREDENTIALS: Final = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_BUSY_CODES: Final = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"}
#: What a policy's refusal is called; a reply to HEAD has no body, and its code is the status.
_REFUSAL_CODES: Final = {"", "403", "AccessDenied", "Forbidden"}
_CREDENTIAL_CODES: Final = {
    "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired",
}  # fmt: skip


class WriteRefused(StoreError):
    """A conditional write found the key taken, another write under way, or its own upload completed."""


class PastTheEnd(StoreError):
    """A range begins at or past the object's end."""


def translate(
    error: ClientError | BotoCoreError, doing: str, key: str, *, reading: bool = False
) -> DeltapostError:
    """The error for `error`, met while `doing` (as in "read of s3://bucket/prefix/key").

    `reading`: what was asked is whether and what the object is, so that a refusal may mean that it is not.
    """
    if isinstance(error, ClientError):
        return _said(error, doing, key, reading)
    kind = type(error).__name__
    if isinstance(error, SSLError):
        return StoreUnavailable(
            f"{doing} failed: {kind}", hint="is the server's CA in DELTAPOST_S3_CA_BUNDLE?"
        )
    if isinstance(error, FlexibleChecksumError):
        return StoreError(f"{doing} failed: the checksum differs from the object's bytes")
    if isinstance(error, (ConnectionError, HTTPClientError, IncompleteReadError)):
        return StoreUnavailable(f"{doing} failed: {kind}")
    if isinstance(error, _CREDENTIALS):
        return ConfigurationError(
            f"{doing} needs credentials: {kind}",
            hint="DELTAPOST_S3_ACCESS_KEY_ID and DELTAPOST_S3_SECRET_ACCESS_KEY, or boto3's usual places",
        )
    if isinstance(error, ParamValidationError):
        return ConfigurationError(f"{doing} cannot be asked for: {error}")
    return StoreError(f"{doing} failed: {kind}")


def _said(error: ClientError, doing: str, key: str, reading: bool) -> DeltapostError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    failed = f"{doing} failed: {code or 'no code'} (HTTP {status})"
    if code == "NoSuchBucket":
        return StoreError(failed, hint="create the bucket, or correct its name")
    if status in (409, 412) or code == "NoSuchUpload":
        return WriteRefused(failed)
    if status == 416:
        return PastTheEnd(failed)
    if code == "RequestTimeTooSkewed":
        return AccessDenied(failed, hint="set this machine's clock")
    if code in _CREDENTIAL_CODES:
        return AccessDenied(failed, hint="the credentials are wrong or have expired")
    if reading and status == 403 and code in _REFUSAL_CODES:
        return NotReadable(key, said=failed)
    if status in (401, 403):
        return AccessDenied(failed, hint="the role's policy does not allow it")
    if status == 404:
        return ObjectMissing(key)
    if status == 501:
        return StoreError(failed, hint="the server lacks a feature; try DELTAPOST_S3_CHECKSUMS=when_required")
    if status == 429 or status >= 500 or code in _BUSY_CODES:
        return StoreUnavailable(failed)
    return StoreError(failed)
