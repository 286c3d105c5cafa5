"""Every error deltapost raises, in one tree.

::

    DeltapostError
    ├── ConfigurationError          a setting, argument or file cannot be used
    │   └── MissingExtra            an optional dependency is not installed
    ├── InvalidTensor  (ValueError) bytes, dtype and shape of a tensor disagree, or cannot be used so
    ├── MalformedMessage            bytes from a stream or the bucket are no message or document
    ├── MalformedPayload            bytes are no payload in the strict safetensors subset
    ├── SchemaMismatch              readable, but not what the manifest's schema says
    ├── NonFinite                   a NaN or an infinity where only finite numbers may be
    ├── SignatureRefused            a signature does not verify, or its key is not the pinned one
    ├── StoreError                  the object store
    │   ├── ObjectMissing           a definite "no such key"
    │   ├── ObjectConflict          a create-once key holds other bytes
    │   ├── AccessDenied            refused by the store's policy
    │   │   └── NotReadable         not there, or not allowed: without the right to list, nobody can tell
    │   └── StoreUnavailable        time-out, 5xx, refused connection: retry   [retryable]
    ├── StateUnavailable            the learner's own disk is full or fails        [retryable]
    ├── SpoolUnavailable            the aggregator's own disk is full or fails     [retryable]
    ├── StreamError                 Redis streams
    │   ├── StreamDenied            refused by the server's ACL, or wrong credentials
    │   └── StreamUnavailable       not reachable, loading, out of memory      [retryable]
    ├── LedgerError                 the SQL ledger
    │   ├── WrongRevision           the schema is older or newer than this release
    │   ├── LeaseLost               another aggregator owns the fragment now
    │   └── LedgerUnavailable       locked, restarting, not reachable          [retryable]
    ├── RunFinished                 the run has ended: nothing more is merged
    └── HistoryError                what is in the bucket contradicts itself or what was seen before
        ├── RunMismatch             a manifest other than the one expected
        └── ForkedHistory           a record older than, or other than, the one already followed

An exception means "cannot continue". What an envelope was judged to be is a verdict, a value, never an
exception. Messages name the object, what was expected and what came; they never carry secrets or payload
bytes.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AccessDenied",
    "ConfigurationError",
    "DeltapostError",
    "ForkedHistory",
    "HistoryError",
    "InvalidTensor",
    "LeaseLost",
    "LedgerError",
    "LedgerUnavailable",
    "MalformedMessage",
    "MalformedPayload",
    "MissingExtra",
    "NonFinite",
    "NotReadable",
    "ObjectConflict",
    "ObjectMissing",
    "RunFinished",
    "RunMismatch",
    "SchemaMismatch",
    "SignatureRefused",
    "SpoolUnavailable",
    "StateUnavailable",
    "StoreError",
    "StoreUnavailable",
    "StreamDenied",
    "StreamError",
    "StreamUnavailable",
    "WrongRevision",
]


class DeltapostError(Exception):
    """Base of all. `code` is stable and greppable; `hint` tells what to do about it."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigurationError(DeltapostError):
    """A setting, argument or file cannot be used as it is."""

    code = "configuration"


class MissingExtra(ConfigurationError):
    """An optional dependency is needed and not installed."""

    code = "missing_extra"

    def __init__(self, extra: str, *, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra {extra!r}", hint=f"pip install 'deltapost[{extra}]'")
        self.extra = extra


class InvalidTensor(DeltapostError, ValueError):
    """Bytes, dtype and shape of a tensor disagree, or the operation does not take this dtype."""

    code = "invalid_tensor"


class MalformedMessage(DeltapostError):
    """Bytes that should be a message or document cannot be read as its format."""

    code = "malformed_message"


class MalformedPayload(DeltapostError):
    """Bytes that should be a payload break the strict safetensors subset, or a codec's own rules."""

    code = "malformed_payload"


class SchemaMismatch(DeltapostError):
    """An entry, dtype or shape differs from the manifest's."""

    code = "schema_mismatch"


class NonFinite(DeltapostError):
    """A NaN or an infinity where only finite numbers may be."""

    code = "non_finite"


class SignatureRefused(DeltapostError):
    """A signature does not verify, or was made with another key than the one expected."""

    code = "signature_refused"


class StoreError(DeltapostError):
    """The object store refused or failed."""

    code = "store"


class ObjectMissing(StoreError):
    """The store said definitely that there is no object under the key."""

    code = "object_missing"

    def __init__(self, key: str) -> None:
        super().__init__(f"no object under the key {key!r}")
        self.key = key


class ObjectConflict(StoreError):
    """A create-once key already holds other bytes than those that were to be written."""

    code = "object_conflict"

    def __init__(self, key: str, *, expected: str, found: str) -> None:
        super().__init__(f"the key {key!r} already holds other bytes: expected {expected}, found {found}")
        self.key = key


class AccessDenied(StoreError):
    """The store's policy refused the request."""

    code = "access_denied"


class NotReadable(AccessDenied):
    """The object is not there, or may not be read: without the right to list, S3 says 403 of both."""

    code = "not_readable"

    def __init__(self, key: str, *, said: str) -> None:
        super().__init__(
            said, hint="not there, or not allowed: without the right to list, S3 says the same of both"
        )
        self.key = key


class StoreUnavailable(StoreError):
    """Time-out, 5xx or no connection: nothing is known about the object."""

    code = "store_unavailable"
    retryable = True


class StateUnavailable(DeltapostError):
    """The learner's state directory cannot be read or written."""

    code = "state_unavailable"
    retryable = True


class SpoolUnavailable(DeltapostError):
    """The aggregator's spool directory has no room, or cannot be written."""

    code = "spool_unavailable"
    retryable = True


class StreamError(DeltapostError):
    """Redis refused or failed."""

    code = "stream"


class StreamDenied(StreamError):
    """Redis refused the user, its password, or a command or key that its ACL does not allow."""

    code = "stream_denied"


class StreamUnavailable(StreamError):
    """Redis is not reachable, loading, read-only or out of memory."""

    code = "stream_unavailable"
    retryable = True


class LedgerError(DeltapostError):
    """The SQL ledger refused or failed."""

    code = "ledger"


class WrongRevision(LedgerError):
    """The ledger's schema is not the one this release works with."""

    code = "wrong_revision"


class LeaseLost(LedgerError):
    """A transaction's lease token, position or head no longer matches: another aggregator went on."""

    code = "lease_lost"


class LedgerUnavailable(LedgerError):
    """The database is locked, restarting or not reachable."""

    code = "ledger_unavailable"
    retryable = True


class RunFinished(DeltapostError):
    """The run, or the fragment in question, has ended: nothing more is merged."""

    code = "run_finished"


class HistoryError(DeltapostError):
    """What the bucket holds contradicts itself, or what was seen before."""

    code = "history"


class RunMismatch(HistoryError):
    """The run's manifest is not the one expected."""

    code = "run_mismatch"


class ForkedHistory(HistoryError):
    """A record is older than, or differs from, the one already followed at its version."""

    code = "forked_history"
