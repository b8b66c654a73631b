"""What is at a URL or path that an operator named, as files to read; and what lies around it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath, PurePosixPath

from ckptsync.errors import ConfigError, NotFound, StoreError, Transient
from ckptsync.layouts.names import Within
from ckptsync.model import Files
from ckptsync.records.names import STORE_FILE
from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import bare
from ckptsync.stores.pieces import Pieces
from ckptsync.stores.tree import ListedFiles, LocalFiles, StoreFiles, Tree, top_files, top_files_without_links
from ckptsync.stores.urls import Remote

Place = Path | Remote
SCHEMES = ("s3", "sftp")
DATED = frozenset({"sftp"})  # rsync and scp keep times there; an object store's are those of the upload
_AT_ONCE = 8
_OF_OTHERS = 8 << 20  # bytes kept of what is not merged: configuration, headers of a base model


@dataclass(frozen=True, slots=True)
class Access:
    """How remote places are reached; each is opened once."""

    options: Mapping[str, object] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)
    _opened: dict[str, Store] = field(default_factory=dict, compare=False)

    def store(self, place: Remote) -> Store:
        """Whatever files are there, as a store; raises ConfigError, StoreError."""
        if place.url not in self._opened:
            self._opened[place.url] = bare(place.url, self.options_of(place), self.limits)
        return self._opened[place.url]

    def options_of(self, place: Remote) -> Mapping[str, object]:
        """All options; where they are given for several schemes (``{"s3": {…}, "sftp": {…}}``), those of this one."""
        if not any(isinstance(self.options.get(scheme), Mapping) for scheme in SCHEMES):
            return self.options
        own = self.options.get(place.scheme)
        return own if isinstance(own, Mapping) else {}

    def within(self, memory: int) -> Access:
        """The same, with parts of files in flight bounded by so many bytes, if not by fewer already."""
        return replace(self, limits=replace(self.limits, memory=min(memory, self.limits.memory)), _opened={})


def tree(place: Place, access: Access) -> Tree:
    """All files below a place.  Raises ConfigError if there is nothing, StoreError."""
    if isinstance(place, Path):
        return LocalFiles(str(place))
    return ListedFiles(access.store(place), is_dated=place.scheme in DATED and store_above(place, access) is None)


def near(files: Files, places: Iterable[Place]) -> Files:
    """``files``, which lie in these places, such that small reads of what is far away are few requests."""
    return Pieces(files) if any(isinstance(place, Remote) for place in places) else files


def named(place: Place, access: Access) -> Files:
    """The files directly in a place that the operator named; raises ConfigError, StoreError."""
    if isinstance(place, Path):
        return top_files(str(place))
    return Pieces(Within(ListedFiles(access.store(place)), ""), _OF_OTHERS)


def around(place: Place, access: Access, names: Collection[str]) -> Files:
    """Those of ``names`` that lie directly in a place that was not named, but lies around one that was.

    Elsewhere than here it is not listed: a run may hold thousands of checkpoints.  Raises ConfigError, Transient.
    """
    if isinstance(place, Path):
        return top_files_without_links(str(place))
    store, prefix = _over(place, access)
    with ThreadPoolExecutor(_AT_ONCE if prefix else 1) as pool:  # as many threads as there shall be connections
        sizes = dict(zip(names, pool.map(lambda name: _size(store, prefix + name), names), strict=True))
    return StoreFiles(store, {name: (prefix + name, size) for name, size in sizes.items() if size is not None})


def store_above(place: Remote, access: Access) -> Remote | None:
    """The place at or above this one that is a store of ours; raises Transient."""

    def is_store(above: Remote) -> bool:
        store, prefix = _over(above, access)
        return _size(store, prefix + STORE_FILE) is not None

    above = [place, *parents(place)]
    _over(place, access)  # what all of them share is opened once, and not by each thread
    with ThreadPoolExecutor(_AT_ONCE // 2) as pool:
        return next((found for found, is_one in zip(above, pool.map(is_store, above), strict=True) if is_one), None)


def _over(place: Remote, access: Access) -> tuple[Store, str]:
    """A store that has the place below a prefix of names: of a bucket one for all, elsewhere one that is let go of soon.

    What is below a directory is reached over no link; what is above it may be one.
    """
    if place.scheme == "s3":
        bucket, _, key = place.rest.partition("/")
        return access.store(Remote(place.scheme, bucket)), f"{key}/" if key else ""
    return bare(place.url, access.options_of(place), access.limits), ""


def parents(place: Remote) -> Iterator[Remote]:
    """The places around it, up to its bucket, or the top of its host."""
    parts = place.rest.split("/")
    for count in range(len(parts) - 1, 0, -1):
        if count > 1 or place.scheme == "s3":
            yield Remote(place.scheme, "/".join(parts[:count]))


def parent(place: Place) -> Place | None:
    """The place around it, if there is one."""
    if isinstance(place, Path):
        return place.parent if place.parent != place else None
    return next(parents(place), None)


def path(place: Place) -> PurePath:
    """Its name taken apart, for whoever asks what it is called."""
    return place if isinstance(place, Path) else PurePosixPath(place.rest)


def real(place: Place) -> Place:
    """Without links.  `Path.resolve` raises RuntimeError on a link to itself before Python 3.13; whoever opens it says it better."""
    return Path(os.path.realpath(place)) if isinstance(place, Path) else place


def is_inside(place: Place, other: Place) -> bool:
    """Whether a place is another one, or below it, as far as their names tell."""
    if isinstance(place, Path) or isinstance(other, Path):
        return isinstance(place, Path) and isinstance(other, Path) and place.is_relative_to(other)
    return place.scheme == other.scheme and path(place).is_relative_to(path(other))


def _size(store: Store, name: str) -> int | None:
    """None where it is not there, or nobody who asks so may see it: whoever may read a checkpoint may not be allowed to look around it."""
    try:
        return store.size(name)
    except (NotFound, ConfigError):
        return None
    except Transient:
        raise
    except StoreError:
        return None
