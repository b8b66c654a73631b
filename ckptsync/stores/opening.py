"""From a URL to a store."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import msgspec

from ckptsync.errors import ConfigError, Corrupt, Exists, NotFound, Unsupported
from ckptsync.records.names import STORE_FILE
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.posix import PosixStore

FORMAT = 1
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ALMOST_URL = re.compile(r"[A-Za-z0-9+.@-]{2,}:(/|$)")  # s3:/bucket, host:/path


def is_store(url: str) -> bool:
    """Whether a store is there already; raises ConfigError or Unsupported for a URL that can be none."""
    return Path(path_of(url), STORE_FILE).is_file()


def open_store(url: str, storage_options: Mapping[str, object] | None = None) -> Store:
    """A store that is there, to read; raises ConfigError if there is none, Unsupported if it is newer than this program."""
    path = _options_checked(path_of(url), storage_options)
    hint = "a worker or `ckptsync push` makes a store; is the path right, is the file system mounted?"
    if not Path(path).is_dir():
        raise ConfigError(f"{url}: no such directory, a store wanted", hint=hint)
    store = PosixStore(path)
    _check_format(store, hint)
    return PosixStore(path, STORE_FILE)


def create_store(url: str, storage_options: Mapping[str, object] | None = None) -> Store:
    """A store to write: made if it is not there yet.  Several may do this at once; raises as `open_store` does."""
    path = _options_checked(path_of(url), storage_options)
    _make_directories(url, path)
    store = PosixStore(path)
    with contextlib.suppress(Exists):
        store.create(STORE_FILE, [msgspec.json.encode({"format": FORMAT}) + b"\n"])
    _check_format(store, "")
    return PosixStore(path, STORE_FILE)


def path_of(url: str) -> str:
    """The absolute path that a plain path or a ``file://`` URL means; raises Unsupported for other schemes, ConfigError."""
    if not url or "\0" in url:
        raise ConfigError(f"{url!r}: a path or a URL of a store wanted")
    if found := _SCHEME.fullmatch(url):
        return _path_of_file_url(url, found[1].lower(), found[2])
    if _ALMOST_URL.match(url) and not Path(url).exists():
        raise ConfigError(f"{url}: neither a path nor a URL", hint="a URL has `://`; a path with a colon may start with `./`")
    try:
        return str(Path(url).expanduser().absolute())
    except RuntimeError as e:
        raise ConfigError(f"{url}: no such user's home directory") from e


def _path_of_file_url(url: str, scheme: str, rest: str) -> str:
    if scheme != "file":
        raise Unsupported(
            f"{url}: stores of kind {scheme}:// are not supported by this version",
            hint="a local or NFS path, or file:///path, works; s3:// and sftp:// stores come later",
        )
    if not rest.startswith("/"):
        raise ConfigError(f"{url}: names a host, an absolute path wanted", hint=f"write file:///{rest}")
    return str(Path(unquote(rest)))


def _options_checked(path: str, storage_options: Mapping[str, object] | None) -> str:
    if storage_options:
        given = ", ".join(sorted(storage_options))
        raise ConfigError(f"{path}: storage_options given ({given}), a path has none", hint="remove storage_options")
    return path


def _make_directories(url: str, path: str) -> None:
    """Make ``path`` and what is missing above it, durably."""
    there = Path(path)
    try:
        while not os.path.lexists(there):
            there = there.parent
        Path(path).mkdir(parents=True, exist_ok=True)
        for made in Path(path).relative_to(there).parents:
            _sync(there / made)
    except OSError as e:
        raise ConfigError(f"{url}: no store can be made here: {(e.strerror or str(e)).lower()}") from e


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
