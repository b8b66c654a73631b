"""From a URL to a store."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError, Unsupported
from ckptsync.records.names import STORE_FILE
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.limits import Limits, Unlimited
from ckptsync.stores.oserrors import HINTS
from ckptsync.stores.pace import Paced
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.retry import Persistence, Retrying
from ckptsync.stores.urls import Remote, located

FORMAT = 1
_NO_PATH = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})
_ABSENT = "a worker or `ckptsync push` makes a store; is the path right, is the file system mounted?"


@runtime_checkable
class Rooted(Protocol):
    """A store in a directory that must be there, as a path must."""

    def has_root(self) -> bool:
        """Whether it is."""
        ...

    def make_root(self) -> None:
        """Make it; raises ConfigError."""
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
    """A store to write: made if it is not there yet.  Several may do this at once; raises as `open_store` does."""
    place = located(url)
    if isinstance(place, Path):
        _make_directories(url, place)
    store = bare(url, storage_options, limits)
    if isinstance(store, Rooted):
        store.make_root()
    with contextlib.suppress(Exists):
        store.create(STORE_FILE, [msgspec.json.encode({"format": FORMAT}) + b"\n"])
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
    while (inner := getattr(source, "inner", None)) is not None:
        source = inner
    return source.root if isinstance(source, PosixStore) else None


def _local(place: Path, witness: str, limits: Limits) -> Store:
    store: Store = PosixStore(str(place), witness)
    if not isinstance(limits.pace, Unlimited):
        store = Paced(store, limits.pace)
    return Retrying(store, Persistence(limits.patience))


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


def _make_directories(url: str, path: Path) -> None:
    """Make ``path`` and what is missing above it, durably."""
    there = path
    try:
        while not os.path.lexists(there):
            there = there.parent
        path.mkdir(parents=True, exist_ok=True)
        for made in path.relative_to(there).parents:
            _sync(there / made)
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
        found = msgspec.json.decode(read_all(store, STORE_FILE, 1 << 16))
        number = found["format"]
    except NotFound:
        raise ConfigError(f"{store.url}: not a store, there is no {STORE_FILE}", hint=hint) from None
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError) as e:
        raise Corrupt(f"{store.url}: {STORE_FILE} has no format number: {e}") from e
    if number != FORMAT:
        raise Unsupported(f"{store.url}: store format {number!r}, {FORMAT} is known here", hint="upgrade ckptsync on this machine")
