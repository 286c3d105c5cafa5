"""History: the newest record this learner saw of each fragment, so that it never goes back or sideways.

It also pins the run's manifest and, where that names none, the aggregators' key of first use, and numbers the
learner's sessions. Kept in one small file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from deltapost.errors import ForkedHistory, RunMismatch
from deltapost.learner.files import write_durably
from deltapost.serialization.documents import Counter, Digest, Document, PublicKey


class _Newest(Document):
    version: Counter
    record: Digest


class _Stored(Document):
    format: Literal[1] = 1
    manifest: Digest
    aggregator_key: PublicKey | None
    session: Counter
    newest: Annotated[tuple[_Newest, ...], Field(min_length=1)]


class History:
    """What one learner has seen of one run. At version 0 the "record" is the manifest's hash."""

    def __init__(self, path: Path, *, manifest_sha256: bytes, fragments: int) -> None:
        self._path = path
        if path.exists():
            self._stored = _Stored.from_bytes(path.read_bytes())
            if self._stored.manifest != manifest_sha256:
                raise RunMismatch(
                    f"this learner knows the run by manifest {self._stored.manifest.hex()[:16]}…, "
                    f"the bucket now holds {manifest_sha256.hex()[:16]}…",
                    hint=f"if the run was really made anew, remove {str(path.parent)!r}",
                )
        else:
            start = _Newest(version=0, record=manifest_sha256)
            self._stored = _Stored(
                manifest=manifest_sha256, aggregator_key=None, session=0, newest=(start,) * fragments
            )

    @property
    def aggregator_key(self) -> bytes | None:
        """The key of the first attestation that was followed; None before that."""
        return self._stored.aggregator_key

    @property
    def session(self) -> int:
        return self._stored.session

    def newest(self, fragment: int) -> tuple[int, bytes]:
        """Version and record hash."""
        seen = self._stored.newest[fragment]
        return seen.version, seen.record

    def next_session(self, above: int) -> int:
        """A session number above all used before and above `above`; durable before it is used."""
        number = max(self._stored.session, above) + 1
        self._replace(session=number)
        return number

    def check(self, fragment: int, version: int, record: bytes) -> None:
        """Raises ForkedHistory for a record older than, or other than, the newest seen."""
        seen, seen_record = self.newest(fragment)
        if version < seen or (version == seen and record != seen_record):
            raise ForkedHistory(
                f"fragment {fragment}: the bucket offers version {version} with record "
                f"{record.hex()[:16]}…, but version {seen} with record {seen_record.hex()[:16]}… was seen",
                hint="an older or altered copy of the bucket is being served",
            )

    def follow(self, fragment: int, version: int, record: bytes, aggregator_key: bytes) -> None:
        """Notes a verified record as the newest seen. Raises ForkedHistory."""
        self.check(fragment, version, record)
        newest = list(self._stored.newest)
        newest[fragment] = _Newest(version=version, record=record)
        self._replace(newest=tuple(newest), aggregator_key=aggregator_key)

    def _replace(self, **values: object) -> None:
        stored = self._stored.model_copy(update=values)
        write_durably(self._path, stored.to_bytes())
        self._stored = stored
