"""From a URL to a store."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckptsync.decoding import format_number
from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError, Unsupported
from ckptsync.records.names import STORE_FILE
from ckptsync.stores.contract import Store, read_all, unwrapped
from ckptsync.stores.limits import Limits
from ckptsync.stores.oserrors import HINTS
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.retry import Persistence, Retrying
from ckptsync.stores.urls import Remote, located

FORMAT = 1
_NO_PATH = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})
_ABSENT = "a worker or `ckptsync push` makes a store; is the path right, is the file system mounted?"

log = logging.getLogger(__name__)


class NoParent(ConfigError):
    """The directory in which a store would be made is not there: a mistyped path, or a file system that is not mounted."""

    def __init__(self, url: str, parent: str) -> None:
        super().__init__(
            f"{url}: no store can be made here: there is no directory {parent}",
            hint=f"is the path right, is the file system mounted?  If both are, make {parent} first",
        )


@runtime_checkable
class Rooted(Protocol):
    """A store in a directory that must be there, as a path must."""

    def has_root(self) -> bool:
        """Whether it is."""
        ...

    def missing_parent(self) -> str:
        """The directory above it, if that is not there; else empty."""
        ...

    def make_root(self) -> None:
        """Make it, and what is missing above it; raises ConfigError."""
        ...


def has_root(store: Store) -> bool:
    """Whether a store's place is there; object stores have none to be missing."""
    return not isinstance(store, Rooted) or store.has_root()


def is_store(url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None) -> bool:
    """Whether a store is there already; raises ConfigError for a URL that can be none, StoreError where it cannot be asked."""
    place = located(url)
    if isinstance(place, Path) and not place.is_dir():
        return False
    store = _local(place, "", limits or Limits()) if isinstance(place, Path) else bare(url, storage_options, limits)
    if not has_root(store):
        return False
    try:
        store.size(STORE_FILE)
    except NotFound:
        return False
    return True


def open_store(url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None) -> Store:
    """A store that is there, to read; raises ConfigError if there is none, Unsupported if it is newer than this program."""
    place = located(url)
    if isinstance(place, Path) and not place.is_dir():
        raise ConfigError(f"{url}: no such directory, a store wanted", hint=_ABSENT)
    store = bare(url, storage_options, limits)
    if not has_root(store):
        raise ConfigError(f"{url}: no such directory, a store wanted", hint=_ABSENT)
    _check_format(store, _ABSENT)
    return _local(place, STORE_FILE, limits or Limits()) if isinstance(place, Path) else store


def create_store(url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None) -> Store:
    """A store to write: made, and told in the log, if it is not there yet.

    Several may do this at once.  Raises NoParent if the directory above it is not there; else as `open_store` does.
    """
    place = located(url)
    if isinstance(place, Path):
        _make_directory(url, place)
    store = bare(url, storage_options, limits)
    if isinstance(store, Rooted) and not store.has_root():
        if parent := store.missing_parent():
            raise NoParent(url, parent)
        store.make_root()
    with contextlib.suppress(Exists):
        store.create(STORE_FILE, [b'{"format":%d}\n' % FORMAT])
        log.warning("%s: a new store was made here", store.url)
    _check_format(store, "")
    return _local(place, STORE_FILE, limits or Limits()) if isinstance(place, Path) else store


def bare(url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None) -> Store:
    """Whatever files are at ``url``, as a store without asking whether it is one of ours; raises ConfigError, Unsupported.

    A path must be a directory that is there.
    """
    place, options, limits = located(url), dict(storage_options or {}), limits or Limits()
    if isinstance(place, Remote):
        return _remote(place, options, limits)
    if options:
        raise ConfigError(
            f"{url}: storage_options given ({', '.join(sorted(options))}), a path has none", hint="remove storage_options"
        )
    return _local(place, "", limits)


def directory_of(source: object) -> str | None:
    """The directory of this machine in which a store's files lie as they are, for who must open them; `None` if there is none."""
    store = unwrapped(source)
    return store.root if isinstance(store, PosixStore) else None


def _local(place: Path, witness: str, limits: Limits) -> Store:
    return Retrying(PosixStore(str(place), witness, pace=limits.pace), Persistence(limits.patience))


def _remote(place: Remote, options: Mapping[str, object], limits: Limits) -> Store:
    """Imported where used: each kind brings a library of its own."""
    if place.scheme == "s3":
        from ckptsync.stores.s3.store import S3Store  # noqa: PLC0415

        return S3Store(place, options, limits)
    if place.scheme == "sftp":
        from ckptsync.stores.sftp.store import SftpStore  # noqa: PLC0415

        return SftpStore(place, options, limits)
    from ckptsync.stores.generic.store import GenericStore  # noqa: PLC0415

    return Retrying(GenericStore(place, options, limits), Persistence(limits.patience))


def _make_directory(url: str, path: Path) -> None:
    """Make ``path``, durably, if it is not there."""
    try:
        if path.is_dir():
            return
        path.mkdir(exist_ok=True)
        _sync(path.parent)
    except FileNotFoundError:
        raise NoParent(url, str(path.parent)) from None
    except OSError as e:
        why = f"{url}: no store can be made here: {(e.strerror or str(e)).lower()}"
        if e.errno in _NO_PATH:
            raise ConfigError(why, hint="is the path right?") from e
        raise StoreError(why, hint=HINTS.get(e.errno or 0, "look at that disk, then try again")) from e


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # EINVAL, EACCES: a directory that was there before may not be ours to sync
            os.fsync(fd)
    finally:
        os.close(fd)


def _check_format(store: Store, hint: str) -> None:
    try:
        number = format_number(read_all(store, STORE_FILE, 1 << 16), STORE_FILE, "a store's format")
    except NotFound:
        raise ConfigError(f"{store.url}: not a store, there is no {STORE_FILE}", hint=hint) from None
    except Corrupt as e:
        raise Corrupt(
            f"{store.url}: {e}", hint='it holds {"format": 1} and nothing else: write that again, if this is your store'
        ) from e
    if number != FORMAT:
        raise Unsupported(f"{store.url}: store format {number!r}, {FORMAT} is known here", hint="upgrade ckptsync on this machine")
