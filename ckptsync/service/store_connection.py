"""Open the service's store, wait while it is unreachable, and never replace a missing one.

A store's file system may not be mounted yet, and a new empty store in its place would hide it.  So
a worker records in its spool to which store it uploaded (`remember`).  If that store is missing, or
refuses this machine, opening raises `Absent`, and the service tries again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.output_dirs import output_directories
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.mounts import is_mounted
from ckptsync.spool import safe_files
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, StoreWrapper
from ckptsync.stores.opening import NoParent, create_store, is_store, open_any
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import SPOOL, UnsafeSpool

MARK = "store"
_LONGEST = 64 * 1024  # bytes


class Absent(StoreError):
    """No store is where one should be: it will appear once it is mounted or made."""


def open_configured(config: Config) -> Store:
    """Return the store of a configuration, with its retries; the first worker creates it.

    Raises:
        Absent: it may appear later: it was there before, its parent is missing, another node must
            make it, or it refuses this machine, which has worked with it.
        Transient: it cannot be reached; the first look is not repeated.
        ConfigError: it refuses this machine, which has never worked with it.  Corrupt, Unsupported:
            its format is unknown.
        StoreError: it, or its path, cannot be read.

    """
    url = config.store.url
    options, limits = options_for(url, config.store.options), limits_of(config.limits)
    try:
        if not is_store(url, options, replace(limits, patience=0.0)):
            if "worker" not in config.roles:
                hint = f"{_question(url)}  The first worker or `ckptsync push` creates the store"
                raise Absent(f"{url}: not a store", hint=hint)
            check_not_gone(url, _served_before(config))
        return create_store(url, options, limits)
    except NoParent as e:
        raise Absent(str(e), hint=e.hint) from e
    except ConfigError as e:
        if not _has_worked(config):
            raise
        check(config)  # what is wrong in the configuration itself stays wrong
        hint = f"{e.hint}. The service keeps trying, since it worked before"
        raise Absent(str(e), hint=hint) from e
    except OSError as e:
        hint = "is the file system mounted, and may this user read it?"
        raise StoreError(f"{url}: {e.strerror}", hint=hint) from e


def check_not_gone(url: str, served: Iterable[str]) -> None:
    """Raise Absent if a store was at a URL before, so that none is made in its place.

    ``served``: the output directories that were uploaded to it, which prove that.  Else a cache of
    its records proves it, if the directory there is empty and older than the cache, as a mount
    point is.  Raises OSError if that directory cannot be read.
    """
    from ckptsync.catalogue.cached import cache_path  # noqa: PLC0415 - a worker alone does without

    why = evidence = ""
    if directory := next(iter(served), ""):
        why = f"the worker of {directory} uploaded to it before"
        evidence = f"{directory}/{SPOOL}/{MARK}"
    elif point := _empty_directory(url):
        with contextlib.suppress(OSError, RuntimeError):
            cache = cache_path(url)
            if point.stat().st_mtime < cache.stat().st_mtime:
                why, evidence = "this user has read it before", str(cache)
    if why:
        hint = f"{_question(url)}  If that store was given up, delete {evidence}"
        raise Absent(f"{url}: no store found, although {why}", hint=hint)


def _empty_directory(url: str) -> Path | None:
    """Return the directory at a path, or its parent without one, if it is empty and no mount.

    None otherwise, and for a remote URL. Raises ConfigError; OSError if it cannot be read.
    """
    location = located(url)
    if isinstance(location, Remote):
        return None
    nearest = location if location.is_dir() else location.parent
    is_empty = nearest.is_dir() and not is_mounted(str(nearest)) and not any(nearest.iterdir())
    return nearest if is_empty else None


def _question(url: str) -> str:
    """Return what to ask the user about a missing store: its URL, or for a path the mount."""
    is_remote = isinstance(located(url), Remote)
    return "is the URL right?" if is_remote else "is the file system mounted?"


def check(config: Config) -> None:
    """Check the store's URL, its options and the output directories, without store I/O.

    Raises ConfigError or Unsupported; of output directories only if none can be used.
    """
    url = config.store.url
    location, options = located(url), options_for(url, config.store.options)
    if not isinstance(location, Path) or location.is_dir():
        open_any(url, options, limits_of(config.limits))
    elif location.exists():
        why = f"{url}: this is a file, and a store is a directory"
        raise ConfigError(why, hint="check the path")
    outputs = output_directories(config.worker.runs, url) if "worker" in config.roles else None
    if outputs and outputs.problems and not outputs.runs:
        raise ConfigError("; ".join(outputs.problems), hint="see worker.runs in the configuration")


def _has_worked(config: Config) -> bool:
    """Return whether this machine has worked with the store.

    A worker's spool proves that; for other roles a cache of its records.  Reads the file system;
    what cannot be read proves nothing.
    """
    if "worker" in config.roles:
        return any(_served_before(config))
    from ckptsync.catalogue.cached import cache_path  # noqa: PLC0415 - a worker alone does without

    with contextlib.suppress(OSError, RuntimeError):
        return cache_path(config.store.url).is_file()
    return False


def _served_before(config: Config) -> Iterator[str]:
    """Yield the output directories whose spool records this store; skip unreadable spools."""
    url = config.store.url
    for run in output_directories(config.worker.runs, url).runs:
        if remembers(Path(run.path) / SPOOL, url):
            yield run.path


def remember(spool: Path, url: str) -> None:
    """Write into a spool to which store its directory is uploaded, if it does not say so yet.

    Raises StoreError or UnsafeSpool.
    """
    if remembers(spool, url):
        return
    try:
        safe_files.write(spool / MARK, _normalized(url))
    except UnsafeSpool:
        raise
    except OSError as e:
        hint = "the worker must run as the user who trains"
        raise StoreError(f"{spool}: {e.strerror}", hint=hint) from e


def remembers(spool: Path, url: str) -> bool:
    """Return whether a spool records this store; False if that cannot be read."""
    with contextlib.suppress(OSError):
        return safe_files.read(spool / MARK, _LONGEST) == _normalized(url)
    return False


def _normalized(url: str) -> bytes:
    """Return a store's URL or path in the spelling of the spool's file.  Raises ConfigError."""
    location = located(url)
    return f"{location.url if isinstance(location, Remote) else location}\n".encode()


class ServiceStore(StoreWrapper):
    """A store that is connected later: until `connect`, every operation raises Transient.

    Once ``is_stopping`` is true, writes raise Transient between two chunks; the next start
    continues them if the store can (`About.origin`), and begins them anew otherwise.
    """

    def __init__(self, url: str, is_stopping: Callable[[], bool]) -> None:  # no store to wrap yet
        self.url, self.late, self.is_exclusive = url, 0.0, False
        self._is_stopping = is_stopping
        self._store: Store | None = None

    def connect(self, store: Store) -> None:
        """Pass every operation to this store from now on."""
        self.late, self.is_exclusive = store.late, store.is_exclusive
        self._store = store

    @property
    def inner(self) -> Store:
        """Return the connected store; raise Transient if there is none yet."""
        if self._store is None:
            hint = "the service tries again every few seconds"
            raise Transient(f"{self.url}: not reached yet", hint=hint)
        return self._store

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Write a file in the connected store.

        Raises Transient before `connect`, and at a stop.
        """
        self.inner.write(name, self._until_stop(name, chunks), about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """Create a file in the connected store.

        Raises Transient before `connect`, and at a stop.
        """
        self.inner.create(name, self._until_stop(name, chunks), about)

    def _until_stop(self, name: str, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Return the chunks; reading them raises Transient once the service is stopping.

        The result can be iterated again if ``chunks`` can.
        """

        def guarded() -> Iterator[Chunk]:
            """Yield the chunks; raise Transient at a stop."""
            for chunk in chunks:
                if self._is_stopping():
                    why = f"{name}: not written, the service is stopping"
                    raise Transient(why, hint="the next start continues the upload")
                yield chunk

        return guarded() if isinstance(chunks, Iterator) else _Repeated(guarded)


class _Repeated:
    """An iterable that begins anew each time."""

    def __init__(self, begin: Callable[[], Iterator[Chunk]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Chunk]:
        """Return a new iterator."""
        return self._begin()
