"""A store at any URL that fsspec knows: ``gs://``, ``az://``, ``webdav://``, ``smb://``, …

What fsspec offers is what can be promised: a write is whole or not at all (see
`fsspec.atomic_write`), but one that was killed begins again, and `create` looks before it writes,
which another writer may do at the same moment. Listings are never taken from fsspec's caches.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError, Transient
from ckptsync.safe_names import checked_path
from ckptsync.stores.contract import (
    UNKNOWN,
    About,
    Chunk,
    Entry,
    check_size,
    checked_prefix,
    too_short,
)
from ckptsync.stores.fsspec.atomic_write import UNFINISHED, WriteJob, way_of
from ckptsync.stores.limits import Limits, limit, take_all
from ckptsync.stores.oserrors import HINTS
from ckptsync.stores.urls import Remote

T = TypeVar("T")
NOTE = "nothing is continued in a store of this kind: a write that was interrupted begins again"
_PER_THREAD = frozenset({"ftp"})  # one connection, which threads may not share

log = logging.getLogger(__name__)


class GenericStore:
    """``options`` go to fsspec's file system.

    Raises ConfigError where its package is missing or they are wrong.  Retries nothing.
    """

    late = 0.0
    is_exclusive = False

    def __init__(
        self, remote: Remote, options: Mapping[str, Any] | None = None, limits: Limits | None = None
    ) -> None:
        self.url = remote.url
        self._remote, self._options, self._pace = (
            remote,
            dict(options or {}),
            (limits or Limits()).pace,
        )
        self._own = threading.local()
        self._shared, self._root = _opened(remote, self._options)
        self._way = way_of(remote.scheme, self._shared)
        self._has_said = False

    def names(self, prefix: str) -> Iterator[Entry]:
        checked_prefix(prefix)
        at = self._path(prefix.rstrip("/"))
        try:
            infos = self._asked(
                prefix or self.url, lambda fs: list(fs.find(at, detail=True).values())
            )
        except NotFound:
            return
        files = (
            (_plain(i, self._root), i)
            for i in infos
            if i.get("type") == "file" and not i.get("islink")
        )
        found = (
            (name, info)
            for name, info in files
            if name.startswith(prefix) and not name.startswith(UNFINISHED)
        )
        yield from sorted(
            Entry(name, int(info["size"]), changed(info)) for name, info in found if name
        )

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        checked_prefix(prefix)
        at = self._path(prefix.rstrip("/"))
        try:
            infos = self._asked(prefix or self.url, lambda fs: fs.ls(at, detail=True))
        except NotFound:
            return []
        below = (
            _plain(i, self._root)
            for i in infos
            if i.get("type") == "directory" and not i.get("islink")
        )
        names = {
            n.removeprefix(prefix)
            for n in below
            if n.startswith(prefix + start) and not f"{n}/".startswith(UNFINISHED)
        }
        return sorted(n for n in names if "/" not in n)

    def size(self, name: str) -> int:
        path = self._path(_checked(name))
        info = self._asked(name, lambda fs: fs.info(path))
        if info.get("type") != "file" or info.get("islink"):
            raise NotFound(f"{name}: not in {self.url}")
        return int(info["size"])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        path, count = self._path(_checked(name)), out.nbytes
        if not count:
            self.size(name)
            return
        take_all(self._pace, count)
        try:
            data = self._asked(name, lambda fs: fs.cat_file(path, start=start, end=start + count))
        except NotFound:
            raise
        except StoreError:
            self._check_end(name, start, count)  # some answer a range behind the end with an error
            raise
        if len(data) < count:
            self._check_end(name, start, count)
            raise Transient(f"{self.url}/{name}: {len(data)} of {count} bytes came")
        if len(data) > count:
            raise StoreError(
                f"{self.url}/{name}: got {len(data)} bytes, asked for {count}: the server does"
                " not support ranges"
            )
        out.cast("B")[:] = data

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._put(_checked(name), chunks, about, lambda: None, replaces=True)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._refuse_taken(_checked(name))
        self._put(name, chunks, about, lambda: self._refuse_taken(name), replaces=False)

    def delete(self, name: str) -> None:
        try:
            # raises NotFound of a directory, which WebDAV would delete with all that is in it
            self.size(name)
            path = self._path(name)
            self._asked(name, lambda fs: fs.rm_file(path))
        except NotFound:
            return  # as it should be

    def _put(
        self,
        name: str,
        chunks: Iterable[Chunk],
        about: About,
        last: Callable[[], None],
        *,
        replaces: bool,
    ) -> None:
        """``last`` is the last look before the name is given."""
        if not self._has_said:
            self._has_said = True
            log.warning("%s: %s", self.url, NOTE)
        total = 0

        def counted() -> Iterator[memoryview]:
            nonlocal total
            for piece in limit(check_size(chunks, about), self._pace):
                total += len(piece)
                yield piece

        sort_error: Callable[[Exception], StoreError] = lambda e: sorted_error(  # noqa: E731
            f"{self.url}/{name}", e
        )
        self._way(
            WriteJob(
                self._fs(), self._root, self._path(name), counted(), sort_error, last, replaces
            )
        )
        try:
            found = self.size(name)
        except (
            NotFound
        ) as e:  # somebody else is replacing it, or the back end has swallowed an error
            raise Transient(f"{self.url}/{name}: not found after it was written") from e
        if found != total:
            raise StoreError(
                f"{self.url}/{name}: the store has {found} bytes, {total} were uploaded",
                hint="check that no other program writes to this store",
            )

    def _refuse_taken(self, name: str) -> None:
        try:
            self.size(name)
        except NotFound:
            return
        raise Exists(f"{name}: already there")

    def _check_end(self, name: str, start: int, count: int) -> None:
        size = self.size(name)
        if start + count > size:
            raise too_short(name, size, start, count)

    def _asked(self, name: str, ask: Callable[[Any], T]) -> T:
        try:
            return ask(self._fs())
        except Exception as e:
            raise sorted_error(f"{self.url}/{name}" if name != self.url else name, e) from e

    def _fs(self) -> Any:
        if self._remote.scheme not in _PER_THREAD:
            return self._shared
        if not hasattr(self._own, "fs"):
            self._own.fs, _ = _opened(self._remote, self._options)
        return self._own.fs

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root or "/"


def _checked(name: str) -> str:
    if checked_path(name).startswith(UNFINISHED):
        raise Corrupt(f"{name}: the name of an unfinished write")
    return name


def _plain(info: Mapping[str, Any], root: str) -> str:
    """The name in the store, or nothing for what nobody could have written here."""
    try:
        return checked_path(str(info["name"]).strip("/").removeprefix(root.strip("/")).lstrip("/"))
    except Corrupt:
        return ""  # the question was whether it is refused


def _opened(remote: Remote, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system, and the path in it that the URL means."""
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
            f"{remote.url}: a package that it needs is not installed: {e.name}",
            hint=f"pip install {e.name}",
        ) from e
    except TypeError as e:
        raise ConfigError(
            f"{remote.url}: storage_options: {e}",
            hint=f"they go to {cls.__module__}.{cls.__name__}",
        ) from e
    except Exception as e:
        error = sorted_error(remote.url, e)
        if isinstance(error, Transient):
            raise error from e
        raise ConfigError(
            f"{remote.url}: cannot be opened: {type(e).__name__}",
            hint=f"see storage_options of {cls.__module__}.{cls.__name__}",
        ) from e


def _class_of(remote: Remote) -> Any:
    try:
        from fsspec.registry import get_filesystem_class, known_implementations  # noqa: PLC0415
    except ImportError as e:
        raise ConfigError(
            f"{remote.url}: fsspec is not installed", hint="pip install 'ckptsync[fsspec]'"
        ) from e
    known = known_implementations.get(remote.scheme, {})
    try:
        return get_filesystem_class(remote.scheme)
    except ValueError as e:
        near = get_close_matches(remote.scheme, ["s3", "sftp", "file", *known_implementations])
        guess = f"did you mean {' or '.join(f'{one}://' for one in near)}?  " if near else ""
        raise ConfigError(
            f"{remote.url}: stores of kind {remote.scheme}:// are not known",
            hint=(
                f"{guess}a store is a path, s3://, sftp://, or what fsspec knows (gs://, az://,"
                " hf://, webdav:// …)"
            ),
        ) from e
    except ImportError as e:
        package = str(known.get("class", "")).partition(".")[0]
        line = str(known.get("err", "")) if package in ("", "fsspec") else f"pip install {package}"
        raise ConfigError(
            f"{remote.url}: the package for {remote.scheme}:// is not installed", hint=line
        ) from e


_PASSING = frozenset(  # of httpx, aiohttp, requests, Azure's and Google's clients, webdav4
    {
        "TransportError",
        "TimeoutException",
        "ClientConnectionError",
        "ServerTimeoutError",
        "ServiceRequestError",
        "ServiceResponseError",
    }
    | {
        "ConnectionError",
        "Timeout",
        "ChunkedEncodingError",
        "RetryError",
        "BadGatewayError",
        "ResourceLocked",
        "FSTimeoutError",
    }
)
_ABSENT = frozenset({"ResourceNotFound", "ResourceNotFoundError", "NoSuchKey"})
_FULL = frozenset({"InsufficientStorage"})
_FINAL = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ENOTEMPTY,
    }
)
_DENIED = (
    "the credentials in storage_options, or in the back end's own configuration, may not do this"
)


def sorted_error(where: str, e: Exception) -> StoreError:
    """The StoreError for what happened at ``where`` (the store and a name)."""
    names = {cls.__name__ for cls in type(e).__mro__}
    codes = (getattr(e, key, None) for key in ("status_code", "status", "code"))
    status = next((code for code in codes if isinstance(code, int) and 100 <= code < 600), None)
    # the operating system's words, or the name of the class alone
    what = (
        e.strerror.lower()
        if isinstance(e, OSError) and isinstance(e.strerror, str)
        else f"failed with {type(e).__name__}"
    )
    if (
        isinstance(e, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        or status == 404
        or names & _ABSENT
    ):
        return NotFound(f"{where}: not found")
    if "ResourceAlreadyExists" in names:  # webdav4's, where nothing may be replaced
        return Exists(f"{where}: already there")
    if isinstance(e, FileExistsError):
        return StoreError(
            f"{where}: a file stands where a directory should be, or a directory where a file"
            " should be"
        )
    if isinstance(e, PermissionError) or status in (401, 403):
        return StoreError(f"{where}: permission denied", hint=_DENIED)
    if status == 507 or names & _FULL:
        return StoreError(f"{where}: no room", hint=HINTS[errno.ENOSPC])
    if isinstance(e, NotImplementedError):
        return StoreError(
            f"{where}: this kind of store cannot do that",
            hint="some of fsspec's file systems can only be read",
        )
    if status is not None and (status in (408, 423, 425, 429) or status >= 500):
        return Transient(f"{where}: the server answered {status}")
    if isinstance(e, OSError) and e.errno in _FINAL:
        return StoreError(f"{where}: {(e.strerror or '').lower()}", hint=HINTS.get(e.errno, ""))
    if isinstance(e, (OSError, TimeoutError, EOFError)) or names & _PASSING:
        return Transient(f"{where}: {what}")
    return StoreError(f"{where}: {what}" + (f" (HTTP {status})" if status else ""))


_KEYS = (
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "modify",
    "timeModified",
    "modificationTime",
    "created",
)
_STAMP = "%Y%m%d%H%M%S"  # RFC 3659, section 2.3: what an FTP server says


def changed(info: Mapping[str, Any]) -> float:
    """Return seconds on the server's clock; 0 where nothing is said, or nothing that is a time."""
    key = next((key for key in _KEYS if info.get(key) is not None), "")
    if not key:
        return 0.0
    value = info[key]
    if isinstance(value, (int, float)):
        # WebHDFS counts milliseconds
        return float(value) / (1000 if key == "modificationTime" else 1)
    text = str(value)
    ways: tuple[Callable[[], datetime], ...] = (
        lambda: value if isinstance(value, datetime) else datetime.strptime(text[:14], _STAMP),  # noqa: DTZ007
        lambda: datetime.fromisoformat(text.replace("Z", "+00:00")),
        lambda: parsedate_to_datetime(text),
    )
    for way in ways:
        try:
            when = way()
        except (ValueError, TypeError):
            continue
        return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    return 0.0
