"""From a URL to a store: to read one, to make one, or to use whatever files are there.

A wrong URL must never look like an empty store, and a directory that was not mounted must never
become a new one. So opening checks the file that marks a store (`STORE_FILE`), and making one
checks the parent directory and the mount table first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, StoreError, Unsupported
from ckptsync.mounts import Unmounted, unmounted_on_way
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores.contract import Rooted, Store, has_root, read_all, unwrapped
from ckptsync.stores.limits import Limits
from ckptsync.stores.oserrors import HINTS
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.retry import Persistence, Retrying
from ckptsync.stores.urls import SCHEME_NAMES, Remote, located
from ckptsync.typed_json import format_number

FORMAT = 1
_NO_PATH = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})
_MADE_BY = "a worker or `ckptsync push` makes a store; check"

log = logging.getLogger(__name__)


class NoParent(ConfigError):
    """The parent directory of a new store is missing.

    The path is mistyped, or a file system is not mounted.
    """

    def __init__(self, url: str, parent: str) -> None:
        super().__init__(
            f"{url}: no store can be made here: there is no directory {parent}",
            hint=(
                f"check the path, and mount the file system; if both are right, make {parent} first"
            ),
        )


class NotMounted(NoParent):
    """A new store would lie where a file system should be mounted, and none is."""

    def __init__(self, url: str, mount: Unmounted) -> None:
        ConfigError.__init__(
            self,
            f"{url}: no store is made here: {mount}",
            hint=f"mount {mount.point}; if it is not used any more, take it out of {mount.source}",
        )


def is_store(
    url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None
) -> bool:
    """Return whether there is a store at a URL; False if there is nothing.

    Asks for the file that marks a store. Raise ConfigError for a URL that can be no store,
    Unsupported for a kind that is refused, StoreError if it cannot be reached.
    """
    target = located(url)
    if isinstance(target, Path) and not target.is_dir():
        return False
    store = (
        _local_store(target, "", limits)
        if isinstance(target, Path)
        else open_any(url, storage_options, limits)
    )
    try:
        return has_root(store) and store.size(STORE_FILE) >= 0
    except NotFound:
        return False


def open_store(
    url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None
) -> Store:
    """Return the store at a URL, to read from; its files may be written, too.

    The file that marks it is read. In a directory it is a witness: later listings, writes and
    failed reads raise StoreError if it is missing or another one.

    Raises:
        ConfigError: there is no store, or as `open_any`.
        Unsupported: its format is newer than this program, or its kind is refused.
        Corrupt: its format cannot be read.
        StoreError: it cannot be reached.

    """
    target = located(url)
    is_path = isinstance(target, Path)
    hint = f"{_MADE_BY} {'the path, and mount the file system' if is_path else 'the URL'}"
    is_present = not isinstance(target, Path) or target.is_dir()
    store = open_any(url, storage_options, limits) if is_present else None
    if store is None or not has_root(store):
        raise ConfigError(f"{url}: no such directory, a store expected", hint=hint)
    _check_format(store, hint)
    return _local_store(target, STORE_FILE, limits) if isinstance(target, Path) else store


def create_store(
    url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None
) -> Store:
    """Return the store at a URL, to write to; make it if it is not there, and log that.

    Several processes may do this at once.

    Raises:
        NoParent: the directory above it is missing.
        NotMounted: a file system is not mounted there.
        ConfigError, Unsupported, Corrupt, StoreError: as `open_store`.

    """
    target = located(url)
    if isinstance(target, Path):
        if not os.path.lexists(target / STORE_FILE):
            for mount in unmounted_on_way(target):
                raise NotMounted(url, mount)
        _make_directory(url, target)
    store = open_any(url, storage_options, limits)
    if isinstance(store, Rooted) and not store.has_root():
        if parent := store.missing_parent():
            raise NoParent(url, parent)
        store.make_root()
    with contextlib.suppress(Exists):
        store.create(STORE_FILE, [b'{"format":%d}\n' % FORMAT])
        log.warning("%s: created a new store", store.url)
    _check_format(store, "")
    return _local_store(target, STORE_FILE, limits) if isinstance(target, Path) else store


def open_any(
    url: str, storage_options: Mapping[str, object] | None = None, limits: Limits | None = None
) -> Store:
    """Return the files at ``url`` as a store that retries, whether it is marked as one or not.

    A path must be an existing directory, which is not checked. Nothing of the store is requested,
    but some of fsspec's file systems connect. Raise ConfigError, also for a path with
    ``storage_options``, Unsupported, and Transient if such a server does not answer.
    """
    target, options, limits = located(url), dict(storage_options or {}), limits or Limits()
    if isinstance(target, Path):
        if options:
            names = ", ".join(sorted(options))
            raise ConfigError(
                f"{url}: storage_options given ({names}), a path has none",
                hint="remove storage_options",
            )
        return _local_store(target, "", limits)
    # imported where used: each kind brings a library of its own
    from ckptsync.stores.fsspec import GenericStore, configured_options  # noqa: PLC0415

    if target.scheme == "s3":
        from ckptsync.stores.s3.client import OPTIONS as S3_OPTIONS  # noqa: PLC0415
        from ckptsync.stores.s3.store import S3Store  # noqa: PLC0415

        defaults = configured_options(("s3", "s3a"), S3_OPTIONS)
        return S3Store(target, {**defaults, **options}, limits)
    if target.scheme == "sftp":
        from ckptsync.stores.sftp.connection import OPTIONS as SFTP_OPTIONS  # noqa: PLC0415
        from ckptsync.stores.sftp.store import SftpStore  # noqa: PLC0415

        defaults = configured_options(("sftp", "ssh"), frozenset(SFTP_OPTIONS))
        return SftpStore(target, {**defaults, **options}, limits)
    return Retrying(GenericStore(target, options, limits), Persistence(limits.patience))


def directory_of(source: object) -> str | None:
    """Return the directory of this machine that holds a store's files; None for other stores.

    ``source`` may be wrapped.
    """
    store = unwrapped(source)
    return store.root if isinstance(store, PosixStore) else None


@dataclass(frozen=True, slots=True)
class Access:
    """Options and limits with which remote stores are opened; each store is opened once."""

    options: Mapping[str, object] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)
    _opened: dict[str, Store] = field(default_factory=dict, compare=False)

    def store(self, target: Remote) -> Store:
        """Return the store at a URL, opened at the first call. Raise as `open_any`."""
        if target.url not in self._opened:
            self._opened[target.url] = open_any(target.url, self.options_of(target), self.limits)
        return self._opened[target.url]

    def options_of(self, target: Remote) -> Mapping[str, object]:
        """Return the options for a URL's scheme, or all options if they are not grouped by scheme.

        Grouped by scheme: ``{"s3": {…}, "sftp": {…}}``; {} for a scheme that is not there.
        """
        if not any(isinstance(self.options.get(scheme), Mapping) for scheme in SCHEME_NAMES):
            return self.options
        scheme_options = self.options.get(target.scheme)
        return scheme_options if isinstance(scheme_options, Mapping) else {}

    def within(self, memory: int) -> Access:
        """Return a copy, which opens stores anew, whose uploads hold at most ``memory`` bytes.

        A lower limit that is set already stays.
        """
        return replace(
            self, limits=replace(self.limits, memory=min(memory, self.limits.memory)), _opened={}
        )


def _local_store(target: Path, witness: str, limits: Limits | None) -> Store:
    """Return the store of a directory, with retries.

    ``witness``: a file that proves that the same file system is mounted; "" for none
    (`PosixStore`).
    """
    limits = limits or Limits()
    return Retrying(
        PosixStore(str(target), witness, pace=limits.pace), Persistence(limits.patience)
    )


def _make_directory(url: str, path: Path) -> None:
    """Make ``path``, and its name durable; do nothing if it is a directory already.

    Raise NoParent if the directory above is missing, ConfigError if the path cannot be a directory,
    StoreError.
    """
    try:
        if path.is_dir():
            return
        path.mkdir(exist_ok=True)
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        # EINVAL, EACCES: a directory that was there before may not be ours to sync
        with contextlib.suppress(OSError):
            os.fsync(fd)
        os.close(fd)
    except FileNotFoundError:
        raise NoParent(url, str(path.parent)) from None
    except OSError as e:
        why = f"{url}: no store can be made here: {(e.strerror or str(e)).lower()}"
        if e.errno in _NO_PATH:
            raise ConfigError(why, hint="check the path") from e
        raise StoreError(
            why, hint=HINTS.get(e.errno or 0, "look at that disk, then try again")
        ) from e


def _check_format(store: Store, hint: str) -> None:
    """Read the file that marks a store, and raise unless its format is known.

    Raise ConfigError without that file (``hint`` says what to check), Corrupt, Unsupported.
    """
    try:
        number = format_number(read_all(store, STORE_FILE, 1 << 16), STORE_FILE, "a store's format")
    except NotFound:
        raise ConfigError(
            f"{store.url}: not a store, there is no {STORE_FILE}", hint=hint
        ) from None
    except Corrupt as e:
        hint = 'it holds {"format": 1} and nothing else: write that again, if this is your store'
        raise Corrupt(f"{store.url}: {e}", hint=hint) from e
    if number != FORMAT:
        hint = "upgrade ckptsync on this machine"
        raise Unsupported(
            f"{store.url}: store format {number!r}, {FORMAT} is known here", hint=hint
        )
