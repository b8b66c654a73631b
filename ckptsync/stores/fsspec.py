"""A store at any URL that fsspec knows: ``gs://``, ``az://``, ``abfs://``, …

fsspec's file systems promise different things, so every scheme gets the contract's minimum: a write
is whole or not at all, but one that was killed begins again, and `create` looks before it writes,
so another writer may create the same name in between. Listings are never taken from fsspec's
caches.

How a file gets its name in one step:

- Google's and Azure's objects appear when the file is closed (read in gcsfs 2026.10 and adlfs
  2026.8: a resumable upload is finalised, a block list committed).
- Elsewhere the bytes go to a temporary name, which is then moved.
- Where fsspec moves by copying and deleting, readers could see half a copy: such stores are not
  written to, unless the server copies objects whole. Schemes that cannot keep the minimum for
  another reason are refused by name (`_REFUSED`).
"""

from __future__ import annotations

import configparser
import contextlib
import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar

from ckptsync.errors import (
    CkptsyncError,
    ConfigError,
    Corrupt,
    Exists,
    NotFound,
    StoreError,
    Transient,
    Unsupported,
)
from ckptsync.install_commands import install, install_extra
from ckptsync.near_names import near_names
from ckptsync.safe_names import RECORDS, checked_path
from ckptsync.stores import progress_signs
from ckptsync.stores.contract import (
    UNKNOWN,
    About,
    Chunk,
    Entry,
    check_size,
    checked_prefix,
    too_short,
)
from ckptsync.stores.limits import Limits, limit
from ckptsync.stores.oserrors import HINTS, PASSING
from ckptsync.stores.urls import SCHEME_NAMES, Remote

T = TypeVar("T")
NOTE = "nothing is continued in a store of this kind: a write that was interrupted begins again"
_UNFINISHED = f"{RECORDS}/unfinished/"
_BLOCK = 8 << 20
_ON_CLOSE = frozenset({"gs", "gcs", "az", "abfs", "abfss"})
# stores of objects, and a dictionary
_WHOLE_COPIES = frozenset({"memory", "oss", "oci", "tos", "tosfs"})
_REFUSED = {
    "dir": "it does not say which file system it is on",
    "ftp": "its one connection cannot be shared by threads",
    "smb": "its servers refuse to move a file onto another one",
    **dict.fromkeys(("webdav", "dav"), "fsspec's client copies a file to move it"),
}

log = logging.getLogger(__name__)


@functools.cache
def configured_options(protocols: tuple[str, ...], known: frozenset[str]) -> Mapping[str, object]:
    """Return the options that fsspec's own configuration has for these protocols.

    fsspec reads ``*.json`` and ``*.ini`` in ~/.config/fsspec (or FSSPEC_CONFIG_DIR), and variables
    such as FSSPEC_S3_ENDPOINT_URL. Options that are not ``known`` are left out, with a warning of
    their names; the answer is remembered for the process. fsspec is imported only if it has a
    configuration: that takes time. Without fsspec a warning is logged, and nothing returned. Raise
    ConfigError if a file cannot be read.
    """
    directory = os.environ.get("FSSPEC_CONFIG_DIR", "~/.config/fsspec")
    has_variables = any(name.startswith("FSSPEC_") for name in os.environ)
    # pathlib raises where there is no home, or no access
    has_files = os.path.isdir(os.path.expanduser(directory))  # noqa: PTH111, PTH112
    if not has_variables and not has_files:
        return {}
    try:
        from fsspec.config import conf  # noqa: PLC0415
    except ImportError:
        log.warning("fsspec's configuration is not read: %s", install_extra("fsspec"))
        return {}
    except (OSError, ValueError, TypeError, configparser.Error) as e:
        raise ConfigError(
            f"{directory}: the configuration of fsspec cannot be read: {e}",
            hint="correct that file; fsspec takes JSON objects: {protocol: {option: value}}",
        ) from e
    options = {
        name: value for protocol in protocols for name, value in conf.get(protocol, {}).items()
    }
    if unknown := sorted(options.keys() - known):
        log.warning(
            "%s://: fsspec's configuration has options that are not used here: %s",
            protocols[0],
            ", ".join(unknown),
        )
    return {name: value for name, value in options.items() if name in known}


class GenericStore:
    """A store that calls one of fsspec's file systems; it retries nothing (see `Retrying`).

    ``options`` go to the file system's class. The constructor raises ConfigError if its package is
    missing or the options are wrong, Unsupported for schemes that are refused, Transient if the
    server does not answer.
    """

    late = 0.0
    is_exclusive = False

    def __init__(
        self, remote: Remote, options: Mapping[str, Any] | None = None, limits: Limits | None = None
    ) -> None:
        self.url = remote.url
        self._scheme = remote.scheme
        self._pace = (limits or Limits()).pace
        self._fs, self._root = _open_file_system(remote, options or {})
        self._has_warned = False

    def names(self, prefix: str) -> Iterator[Entry]:
        """Yield the files below ``prefix`` (see `Store.names`); all are listed before the first."""
        infos = self._list_infos(
            prefix, "file", lambda fs, path: fs.find(path, detail=True).values()
        )
        yield from sorted(
            Entry(name, int(info["size"]), mtime_of(info))
            for name, info in infos
            if name.startswith(prefix) and not name.startswith(_UNFINISHED)
        )

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        """Return the directories directly below ``prefix`` (see `Store.dirs`)."""
        infos = self._list_infos(prefix, "directory", lambda fs, path: fs.ls(path, detail=True))
        names = {
            name.removeprefix(prefix)
            for name, _ in infos
            if name.startswith(prefix + start) and not f"{name}/".startswith(_UNFINISHED)
        }
        return sorted(name for name in names if "/" not in name)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise NotFound, also for a directory or a link."""
        path = self._path(_checked(name))
        info = self._call(name, lambda fs: fs.info(path))
        if info.get("type") != "file" or info.get("islink"):
            raise NotFound(f"{name}: not in {self.url}")
        return int(info["size"])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``, within the bandwidth limit.

        Raises:
            NotFound: there is no such file.
            Corrupt: the file ends before ``out`` is full.
            Transient: fewer bytes came than the file has.
            StoreError: more bytes came than were requested.

        """
        path, count = self._path(_checked(name)), out.nbytes
        if not count:
            self.size(name)
            return
        for _ in limit([out], self._pace):
            pass  # fsspec returns a range at once, so its bytes are counted before
        try:
            data = self._call(name, lambda fs: fs.cat_file(path, start=start, end=start + count))
        except NotFound:
            raise
        except StoreError:
            # some answer a range behind the end with an error
            self._check_length(name, start, count)
            raise
        if len(data) < count:
            self._check_length(name, start, count)
            raise Transient(f"{self.url}/{name}: {len(data)} of {count} bytes came")
        if len(data) > count:
            raise StoreError(
                f"{self.url}/{name}: got {len(data)} bytes, asked for {count}: the server does"
                " not support ranges"
            )
        out.cast("B")[:] = data

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store all of the content, or nothing (see `Store.write`)."""
        self._put(_checked(name), chunks, about, replaces=True)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Store a new file; raise Exists if the name is taken before, or after, all was sent."""
        self._check_free(_checked(name))
        self._put(name, chunks, about, replaces=False)

    def delete(self, name: str) -> None:
        """Delete a file; do nothing if it is not there."""
        try:
            self.size(name)  # raises NotFound of a directory
            path = self._path(name)
            self._call(name, lambda fs: fs.rm_file(path))
        except NotFound:
            return  # as it should be

    def _list_infos(
        self, prefix: str, kind: str, ask: Callable[[Any, str], Iterable[Mapping[str, Any]]]
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the entries that ``ask`` lists for ``prefix``: names in the store, fsspec's facts.

        ``ask`` gets the file system and its path. ``kind``: "file" or "directory"; links, and names
        that no store could have, are left out. A missing directory has no entries. Raise
        StoreError, ConfigError.
        """
        path = self._path(checked_prefix(prefix).rstrip("/"))
        try:
            infos = self._call(prefix or self.url, lambda fs: list(ask(fs, path)))
        except NotFound:
            return []
        entries = [
            (_stored_name(info, self._root), info)
            for info in infos
            if info.get("type") == kind and not info.get("islink")
        ]
        return [(name, info) for name, info in entries if name]

    def _put(self, name: str, chunks: Iterable[Chunk], about: About, *, replaces: bool) -> None:
        """Write a file, and compare its size afterwards. The first call logs a warning (`NOTE`).

        ``replaces``: false if the name must be free. An error of ``chunks`` is raised unchanged;
        others become StoreError. Raise Exists if the name is taken, Transient if the file is
        missing afterwards.
        """
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: %s", self.url, NOTE)
        pieces = _Pieces(limit(check_size(chunks, about), self._pace))
        publish = self._close_to_publish if self._scheme in _ON_CLOSE else self._move_to_publish
        try:
            publish(self._fs, name, pieces, replaces=replaces)
        except Exception as e:
            # what the source raised is no error of the store, however the file system tells it
            if pieces.error and pieces.error is not e:
                raise pieces.error from None
            if pieces.error or isinstance(e, CkptsyncError):
                raise
            raise error_for(f"{self.url}/{name}", e) from e
        try:
            size = self.size(name)
        except NotFound as e:
            # somebody else is replacing it, or the back end has swallowed an error
            raise Transient(f"{self.url}/{name}: not found after it was written") from e
        if size != pieces.size:
            raise StoreError(
                f"{self.url}/{name}: the store has {size} bytes, {pieces.size} were uploaded",
                hint="check that no other program writes to this store",
            )

    def _close_to_publish(self, fs: Any, name: str, pieces: _Pieces, *, replaces: bool) -> None:
        """Write under the final name; the object appears when the file is closed.

        After an error the file is discarded, and the error is raised unchanged. Unless
        ``replaces``, raise Exists if the name is taken just before the file is closed.
        """
        file = fs.open(self._path(name), "wb", block_size=_BLOCK)
        try:
            for piece in pieces:
                file.write(piece)
            if not replaces:
                self._check_free(name)
            file.close()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                file.discard()
            file.closed = True  # else it would be closed, and so stored, when it is collected
            raise

    def _move_to_publish(self, fs: Any, name: str, pieces: _Pieces, *, replaces: bool) -> None:
        """Write to a temporary name, which is never listed, and move that to the final name.

        Raise StoreError if the file system moves by copying, and a copy may be seen half written
        (it is not in `_WHOLE_COPIES`); Exists as `_check_free` does; what fsspec raises. After an
        error the temporary file is removed.
        """
        path = self._path(name)
        part = f"{self._root}/{_UNFINISHED}{secrets.token_hex(8)}.part"
        if self._scheme not in _WHOLE_COPIES and not _has_own_move(fs):
            raise StoreError(
                f"{path}: this kind of store cannot write a file atomically, so ckptsync does not"
                " write to it",
                hint="readers could see a half-written file; use a path, s3:// or sftp:// instead",
            )
        fs.makedirs(part.rpartition("/")[0], exist_ok=True)
        try:
            _write_pieces(fs, part, pieces)
            if not replaces:
                self._check_free(name)
            fs.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            fs.mv(part, path)
        except BaseException:
            # the first error is the one to tell; what is left is never listed
            with contextlib.suppress(Exception):
                fs.rm_file(part)
            raise

    def _check_free(self, name: str) -> None:
        """Raise Exists if the name is taken."""
        try:
            self.size(name)
        except NotFound:
            return
        raise Exists(f"{name}: already there")

    def _check_length(self, name: str, start: int, count: int) -> None:
        """Raise Corrupt if the file ends before byte ``start + count``, NotFound if it is gone."""
        size = self.size(name)
        if start + count > size:
            raise too_short(name, size, start, count)

    def _call(self, name: str, ask: Callable[[Any], T]) -> T:
        """Return what ``ask`` returns for the file system.

        Raise its errors as the StoreError about ``name``.
        """
        try:
            return ask(self._fs)
        except Exception as e:
            raise error_for(f"{self.url}/{name}" if name != self.url else name, e) from e

    def _path(self, name: str) -> str:
        """Return a name's path in fsspec's file system; "" is the store's root."""
        return f"{self._root}/{name}" if name else self._root or "/"


class _Pieces:
    """The pieces of a file from front to back, counted as they are taken.

    ``size``: bytes so far. ``error``: what their source raised, which is then no error of the
    store.
    """

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces, self.size = pieces, 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        """Return the next piece, and count it as sent; note and raise an error of the source."""
        try:
            piece = next(self._pieces)
        except StopIteration:
            raise
        except Exception as e:
            self.error = e
            raise
        self.size += len(piece)
        progress_signs.count_sent(len(piece))
        return piece


def _write_pieces(fs: Any, path: str, pieces: Iterable[memoryview]) -> None:
    """Write all pieces to a new file, and close it; close it after an error, too."""
    file = fs.open(path, "wb", block_size=_BLOCK)
    try:
        for piece in pieces:
            file.write(piece)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            file.close()
        raise
    file.close()


def _has_own_move(fs: Any) -> bool:
    """Return whether the file system moves files itself; fsspec's default copies and deletes."""
    from fsspec import AbstractFileSystem  # noqa: PLC0415
    from fsspec.asyn import AsyncFileSystem  # noqa: PLC0415

    return type(fs).mv not in (AbstractFileSystem.mv, AsyncFileSystem.mv)


def _checked(name: str) -> str:
    """Return ``name`` if it is a plain path; raise Corrupt otherwise.

    Raise it too for the names of unfinished writes.
    """
    if checked_path(name).startswith(_UNFINISHED):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name


def _stored_name(info: Mapping[str, Any], root: str) -> str:
    """Return an entry's name in the store; "" if no store could have such a name."""
    try:
        return checked_path(str(info["name"]).strip("/").removeprefix(root.strip("/")).lstrip("/"))
    except Corrupt:
        return ""


def _open_file_system(remote: Remote, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return fsspec's file system without its cache, and the path in it that the URL means.

    Raises:
        Unsupported: the scheme is refused (`_REFUSED`).
        ConfigError: a package is missing, or the options are wrong.
        Transient: the server does not answer now.

    """
    if why := _REFUSED.get(remote.scheme):
        raise Unsupported(
            f"{remote.url}: {remote.scheme}:// stores are not supported: {why}",
            hint="mount it and name the path, or use s3:// or sftp://",
        )
    cls = _class_of(remote)
    try:
        fs = cls(
            **{**cls._get_kwargs_from_urls(remote.url), **options, "skip_instance_cache": True}
        )
        if hasattr(fs, "dircache"):
            # not every class lets the option through to its base
            fs.dircache = type(fs.dircache)(use_listings_cache=False)
        return fs, str(fs._strip_protocol(remote.url)).rstrip("/")
    except ImportError as e:
        raise ConfigError(
            f"{remote.url}: a package that it needs is not installed: {e.name or e}",
            hint=install(e.name) if e.name else "install what it names, into the same Python",
        ) from e
    except TypeError as e:
        raise ConfigError(
            f"{remote.url}: storage_options: {e}",
            hint=f"they go to {cls.__module__}.{cls.__name__}",
        ) from e
    except Exception as e:
        error = error_for(remote.url, e)
        if isinstance(error, Transient):
            raise error from e
        raise ConfigError(
            f"{remote.url}: cannot be opened: {type(e).__name__}",
            hint=f"see storage_options of {cls.__module__}.{cls.__name__}",
        ) from e


def _class_of(remote: Remote) -> Any:
    """Return fsspec's class for a URL's scheme.

    Raise ConfigError if fsspec or the scheme's package is missing, or nobody knows the scheme.
    """
    try:
        from fsspec.registry import get_filesystem_class, known_implementations  # noqa: PLC0415
    except ImportError as e:
        raise ConfigError(
            f"{remote.url}: fsspec is not installed", hint=install_extra("fsspec")
        ) from e
    info = known_implementations.get(remote.scheme, {})
    try:
        return get_filesystem_class(remote.scheme)
    except ValueError as e:
        similar = near_names(remote.scheme, [*SCHEME_NAMES, "file", *known_implementations], 3)
        guess = (
            f"did you mean {' or '.join(f'{scheme}://' for scheme in similar)}?  "
            if similar
            else ""
        )
        own_schemes = ", ".join(f"{name}://" for name in SCHEME_NAMES)
        raise ConfigError(
            f"{remote.url}: stores of kind {remote.scheme}:// are not known",
            hint=(
                f"{guess}a store is a path, {own_schemes}, or what fsspec knows (gs://, az:// …)"
            ),
        ) from e
    except ImportError as e:
        package = str(info.get("class", "")).partition(".")[0]
        line = str(info.get("err", "")) if package in ("", "fsspec") else install(package)
        raise ConfigError(
            f"{remote.url}: the package for {remote.scheme}:// is not installed", hint=line
        ) from e


# of aiohttp, Google's and Azure's clients
_PASSING = frozenset(
    {"ClientConnectionError", "TransportError", "ServiceRequestError", "ServiceResponseError"}
)
# errno of what does not pass; a server's disk that fails for us (EIO) may answer again
_FINAL = {errno.EINVAL, errno.ENOTEMPTY, *HINTS} - {errno.EIO} - PASSING
_DENIED = (
    "the credentials in storage_options, or in the back end's own configuration, may not do this"
)


def error_for(title: str, e: Exception) -> StoreError:
    """Return the StoreError for an exception of fsspec or a client library.

    ``title`` is the store and a name, for the message. NotFound if there is no such file.
    Transient if the same call may succeed later: the server is busy or fails, the connection broke,
    or the system's error passes.
    """
    names = {cls.__name__ for cls in type(e).__mro__}
    codes = (getattr(e, key, None) for key in ("status_code", "status", "code"))
    status = next((code for code in codes if isinstance(code, int) and 100 <= code < 600), None)
    # the operating system's words, or the name of the class alone
    reason = (
        e.strerror.lower()
        if isinstance(e, OSError) and isinstance(e.strerror, str)
        else f"failed with {type(e).__name__}"
    )
    if (
        isinstance(e, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        or status == 404
        or "ResourceNotFoundError" in names  # Azure's
    ):
        return NotFound(f"{title}: not found")
    if isinstance(e, FileExistsError):
        return StoreError(
            f"{title}: a file stands where a directory should be, or a directory where a file"
            " should be"
        )
    if isinstance(e, PermissionError) or status in (401, 403):
        return StoreError(f"{title}: permission denied", hint=_DENIED)
    if status == 507:
        return StoreError(f"{title}: no room", hint=HINTS[errno.ENOSPC])
    if isinstance(e, NotImplementedError):
        return StoreError(
            f"{title}: this kind of store cannot do that",
            hint="some of fsspec's file systems can only be read",
        )
    if status is not None and (status in (408, 423, 425, 429) or status >= 500):
        return Transient(f"{title}: the server answered {status}")
    if isinstance(e, OSError) and e.errno in _FINAL:
        return StoreError(f"{title}: {(e.strerror or '').lower()}", hint=HINTS.get(e.errno, ""))
    if isinstance(e, (OSError, TimeoutError, EOFError)) or names & _PASSING:
        return Transient(f"{title}: {reason}")
    return StoreError(f"{title}: {reason}" + (f" (HTTP {status})" if status else ""))


_KEYS = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


def mtime_of(info: Mapping[str, Any]) -> float:
    """Return a file's time in seconds on the server's clock; 0.0 if its facts have no time."""
    value = next((info[key] for key in _KEYS if info.get(key) is not None), None)
    if isinstance(value, (int, float)):
        return float(value)
    try:
        when = (
            value
            if isinstance(value, datetime)
            else datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        )
    except ValueError:
        return 0.0
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
