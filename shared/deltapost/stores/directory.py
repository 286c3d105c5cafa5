"""Objects as files below one directory: whole or absent, never half, even after kill -9 or a power cut.

The object of key `a/b` is the file `a/b`. A put writes a temporary file in the same file system, syncs it and
links it to its name; a link to a taken name fails, which is what makes a put create-once, between processes
too. Beside the objects, `.deltapost/` keeps the temporary files (those older than an hour are removed at
opening) and the metadata.

Failure modes. A full or broken disk is StoreUnavailable, with the path, and so is a directory that is gone
under an open store, as when its disk was unmounted: what is not there then is no definite answer. A directory
that may not be written is AccessDenied. An object's metadata is a file of its own, created once and *before*
the object appears: a reader finds it complete, but of two puts of one key that race, or of a put that was
killed and one that came later, the metadata of the first stays. Where keys end in their content's hash, both
describe the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from deltapost.errors import AccessDenied, ObjectConflict, ObjectMissing, StoreError, StoreUnavailable
from deltapost.stores import Blob, ObjectInfo, UnfinishedUpload
from deltapost.stores.keys import check_key, check_metadata, check_prefix, check_range, conflict
from deltapost.stores.reading import PIECE_BYTES, Sink, pieces

#: Where temporary files and metadata lie; no key can begin with a dot.
_HIDDEN: Final = ".deltapost"

#: Seconds after which a temporary file belongs to no running put: the largest object takes minutes.
_STALE_SECONDS: Final = 3600.0

_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}
_FAILING: Final = {
    errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ESTALE,
    errno.ETIMEDOUT,
}  # fmt: skip


class DirectoryStore:
    """An ObjectStore in one directory, for one machine or a shared POSIX file system with hard links.

    >>> import tempfile
    >>> store = DirectoryStore(tempfile.mkdtemp())
    >>> store.put("run/manifest", b"bytes"), store.put("run/manifest", b"bytes")
    (True, False)
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = os.path.realpath(directory)
        self._temporary = os.path.join(self._root, _HIDDEN, "tmp")
        self._metadata = os.path.join(self._root, _HIDDEN, "metadata")
        with _reported(self._root):
            _make_directories(self._temporary)
            self._remove_stale()

    def __repr__(self) -> str:
        return f"DirectoryStore({Path(self._root).as_uri()})"

    def put(self, key: str, data: bytes | memoryview, *, metadata: Mapping[str, str] | None = None) -> bool:
        path = self._path(key)
        checked = check_metadata(metadata)
        with _reported(path):
            if checked and not os.path.lexists(path):
                described = json.dumps(checked, sort_keys=True).encode()
                self._create(os.path.join(self._metadata, key), described)
            if self._create(path, data):
                return True
            _compare(key, path, data)
            # Another process may have linked the file and not yet synced the directory.
            _sync_directory(os.path.dirname(path))
            return False

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> Blob:
        check_range(offset, length)
        path = self._path(key)
        with _reported(path), self._open(key, path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(offset, size))
            data = file.read(-1 if length is None else length)
            return Blob(data, size, self._read_metadata(key))

    def read(self, key: str, sink: Sink, *, length: int) -> ObjectInfo:
        path = self._path(key)
        with _reported(path), self._open(key, path) as file:
            size = os.fstat(file.fileno()).st_size
            left = min(length, size)
            while left and (piece := file.read(min(left, PIECE_BYTES))):
                left -= len(piece)
                sink(piece)
            return ObjectInfo(key, size, self._read_metadata(key))

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with _reported(path), self._open(key, path) as file:
            return ObjectInfo(key, os.fstat(file.fileno()).st_size, self._read_metadata(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._check_there()
        above, slash, _ = prefix.rpartition("/")
        return self._walk(above + slash, prefix)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _reported(path):
            for stale in (path, os.path.join(self._metadata, key)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if not os.path.isdir(stale):
                        os.unlink(stale)

    def unfinished(self, prefix: str, *, idle_seconds: float) -> Iterator[UnfinishedUpload]:
        check_prefix(prefix)
        with _reported(self._temporary):
            entries = sorted(os.scandir(self._temporary), key=lambda entry: entry.name)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                idle = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if idle >= idle_seconds:
                    yield UnfinishedUpload(None, entry.name, idle)

    def abort(self, upload: UnfinishedUpload) -> None:
        path = os.path.join(self._temporary, os.path.basename(upload.upload))
        with _reported(path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def _path(self, key: str) -> str:
        path = os.path.join(self._root, check_key(key))
        if os.path.realpath(path) != path:
            raise StoreError(f"a symbolic link lies on the way to the key {key!r}", hint=f"remove it: {path}")
        return path

    def _open(self, key: str, path: str) -> Any:
        try:
            return open(path, "rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._check_there()
            raise ObjectMissing(key) from None

    def _check_there(self) -> None:
        """Raises StoreUnavailable unless the directory that was opened still is what stands there."""
        if not os.path.isdir(self._temporary):
            raise StoreUnavailable(
                f"the directory store {self._root} is gone, or is another directory than was opened",
                hint="mount its disk again, or put it back",
            )

    def _create(self, path: str, data: bytes | memoryview) -> bool:
        """Whether `path` was free and now is a whole file of `data`, on the disk with its name."""
        self._check_there()
        parent = os.path.dirname(path)
        temporary = os.path.join(self._temporary, f"{os.getpid()}-{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                for piece in pieces(data):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            _make_directories(parent)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            _sync_directory(parent)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def _read_metadata(self, key: str) -> dict[str, str]:
        try:
            with open(os.path.join(self._metadata, key), "rb") as file:
                found: dict[str, str] = json.load(file)
                return found
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return {}

    def _walk(self, above: str, prefix: str) -> Iterator[ObjectInfo]:
        path = os.path.join(self._root, above.rstrip("/")).rstrip("/")
        if os.path.realpath(path) != path:  # a link on the way to the prefix: as in a walk, not followed
            return
        with _reported(path):
            try:
                entries = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(path)]
            except (FileNotFoundError, NotADirectoryError):
                return
        # A directory sorts as its keys do, with the slash: `a-b` comes before `a/b`.
        named = sorted(
            (name + "/" if stat.S_ISDIR(status.st_mode) else name, status) for name, status in entries
        )
        for name, status in named:
            key = above + name
            if name.startswith(".") or not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(key, prefix)
            elif stat.S_ISREG(status.st_mode) and key.startswith(prefix):
                yield ObjectInfo(key, status.st_size)

    def _remove_stale(self) -> None:
        for entry in os.scandir(self._temporary):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                    os.unlink(entry.path)


def _compare(key: str, path: str, data: bytes | memoryview) -> None:
    """ObjectConflict unless the file holds exactly `data`."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise ObjectConflict(
            key, expected=f"{len(data)} bytes", found="keys below it, which make it a directory"
        )
    if status.st_size != len(data):
        raise conflict(key, data, found_size=status.st_size)
    digest, wanted = hashlib.sha256(), hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(PIECE_BYTES):
            digest.update(chunk)
    for piece in pieces(data):
        wanted.update(piece)
    if digest.digest() != wanted.digest():
        raise conflict(key, data, found_size=status.st_size, found_sha256=digest.hexdigest())


def _make_directories(path: str) -> None:
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_directories(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    _sync_directory(parent)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turns what the file system says into the error tree's words."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        if error.errno in _DENIED:
            raise AccessDenied(
                f"the directory store was refused: {reason}", hint=f"permissions of {path}"
            ) from error
        if error.errno in _FAILING:
            raise StoreUnavailable(
                f"the directory store failed: {reason}", hint=f"free space or repair the disk of {path}"
            ) from error
        raise StoreError(f"the directory store failed: {reason}", hint=f"look at {path}") from error
