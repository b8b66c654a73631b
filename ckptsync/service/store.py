"""The service's store: one that is away is waited for, one that was there and has gone is not made again, and writes end when the process is to end.

A worker remembers in its spool which store an output directory was served to: a store that was there, and is no store now, is one whose file system is not
mounted.  So is one that cannot be reached, or that refuses this machine now and let it in before (its key was changed, and comes here a little later): it is
asked again every few seconds by whoever calls, and no longer here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.runs import output_directories
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.spool import folders
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, StoreWrapper
from ckptsync.stores.opening import NoParent, bare, create_store, is_store
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import OURS, UnsafeSpool

MARK = "store"
_LONGEST = 64 * 1024  # bytes


class Absent(StoreError):
    """No store where one should be: it will come, once it is mounted or made."""


def opened(config: Config) -> Store:
    """Open the store; the first worker makes it.

    Raises Absent if it is not there, or refuses this machine, and was before, or if no worker works here, or if the directory above it is not there either;
    Transient, after one try, if it cannot be reached; ConfigError if it refuses a machine that never worked with it.
    """
    try:
        return _opened(config)
    except NoParent as e:
        raise Absent(str(e), hint=e.hint) from e
    except ConfigError as e:
        if not _has_worked(config):
            raise
        check(config)  # what is wrong in the configuration itself stays wrong
        raise Absent(str(e), hint=f"{e.hint}.  It worked before, so it is tried again") from e


def check(config: Config) -> None:
    """Raise ConfigError or Unsupported for what no service could begin with.  The store is not asked: one that is away comes back."""
    url = config.store.url
    location, options = located(url), options_for(url, config.store.options)
    if not isinstance(location, Path) or location.is_dir():
        bare(url, options, limits_of(config.limits))
    elif location.exists():
        raise ConfigError(f"{url}: a file, a store's directory wanted", hint="is the path right?")
    found = output_directories(config.worker.runs, url) if "worker" in config.roles else None
    if found and found.problems and not found.runs:
        raise ConfigError("; ".join(found.problems), hint="see worker.runs in the configuration")


def _opened(config: Config) -> Store:
    url = config.store.url
    if not _is_there(config):
        where = "is the URL right?" if isinstance(located(url), Remote) else "is the file system mounted?"
        if "worker" not in config.roles:
            raise Absent(f"{url}: not a store", hint=f"{where}  A store is made by the first worker or push")
        if served := next(_remembering(config), ""):
            raise Absent(
                f"{url}: was a store when {served} was last served, and is none now",
                hint=f"{where}  If that store was given up, delete {served}/{OURS}/{MARK}",
            )
    return create_store(url, options_for(url, config.store.options), limits_of(config.limits))


def _is_there(config: Config) -> bool:
    url = config.store.url
    try:
        return is_store(url, options_for(url, config.store.options), replace(limits_of(config.limits), patience=0.0))
    except OSError as e:
        raise StoreError(f"{url}: {e.strerror}", hint="is the file system mounted, and may this user read it?") from e


def _has_worked(config: Config) -> bool:
    """Whether this machine has worked with the store before, as far as is remembered: by a spool, or by what a head keeps of the store's catalogue."""
    if "worker" in config.roles:
        return any(_remembering(config))
    from ckptsync.catalogue import kept  # noqa: PLC0415 - a worker alone does without

    with contextlib.suppress(OSError, RuntimeError):
        return kept.path(config.store.url).is_file()
    return False


def _remembering(config: Config) -> Iterator[str]:
    """The output directories that were served to this store."""
    url = config.store.url
    return (run.path for run in output_directories(config.worker.runs, url).runs if remembers(Path(run.path) / OURS, url))


def remember(spool: Path, url: str) -> None:
    """Say in a spool directory which store it is served to; raises StoreError, UnsafeSpool."""
    if remembers(spool, url):
        return
    try:
        folders.write(spool / MARK, _written(url).encode())
    except UnsafeSpool:
        raise
    except OSError as e:
        raise StoreError(f"{spool}: {e.strerror}", hint="the worker must run as the user who trains") from e


def remembers(spool: Path, url: str) -> bool:
    """Whether it was served to this very store last.  What cannot be read says nothing."""
    with contextlib.suppress(OSError):
        return folders.read(spool / MARK, _LONGEST) == _written(url).encode()
    return False


def _written(url: str) -> str:
    """The location, however its URL is spelt."""
    location = located(url)
    return f"{location.url if isinstance(location, Remote) else location}\n"


class ServiceStore(StoreWrapper):
    """A store that is not there until it `came`: until then all that is asked of it raises Transient, and only its location is known.

    Once ``is_stopping`` writes raise Transient between two chunks, since the same succeeds after the next start: what they had written is kept to be
    continued where the store can do that (`About.origin`), and removed elsewhere.
    ``handed``: bytes that were given to be written since the process began, those of tries that failed among them.
    """

    def __init__(self, url: str, is_stopping: Callable[[], bool]) -> None:  # no store to wrap yet
        self.url, self.late, self.is_exclusive = url, 0.0, False
        self.handed = 0
        self._is_stopping = is_stopping
        self._store: Store | None = None
        self._lock = threading.Lock()

    def came(self, store: Store) -> None:
        """It is there."""
        self.late, self.is_exclusive = store.late, store.is_exclusive
        self._store = store

    @property
    def inner(self) -> Store:
        """The store that came; raises Transient until then."""
        if self._store is None:
            raise Transient(f"{self.url}: not reached yet", hint="it is asked again every few seconds")
        return self._store

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self.inner.write(name, self._until_stop(name, chunks), about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        """As the contract says."""
        self.inner.create(name, self._until_stop(name, chunks), about)

    def _until_stop(self, name: str, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
        """Those that can be had again can be had again."""
        until = _Until(self, name, chunks)
        return iter(until) if isinstance(chunks, Iterator) else until

    def pass_on(self, name: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The chunks, until a stop is asked for."""
        for chunk in chunks:
            if self._is_stopping():
                raise Transient(f"{name}: not written, the service is stopping", hint="the next start goes on with it")
            yield chunk
            with self._lock:  # several files are written at once
                self.handed += memoryview(chunk).nbytes


class _Until:
    """Chunks that are passed on by a store, each time that somebody begins with them."""

    def __init__(self, store: ServiceStore, name: str, chunks: Iterable[Chunk]) -> None:
        self._store, self._name, self._chunks = store, name, chunks

    def __iter__(self) -> Iterator[Chunk]:
        return self._store.pass_on(self._name, self._chunks)
