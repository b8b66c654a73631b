"""Open what is at a path or URL that an operator named, as files to read.

And what lies around it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath, PurePosixPath

from ckptsync.errors import ConfigError, NotFound, StoreError, Transient
from ckptsync.layouts.file_names import Within
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores.checkpoint_files import (
    FileTree,
    ListedFiles,
    StoreFiles,
    TopFiles,
    directory_files,
)
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access, is_store, open_any, open_store
from ckptsync.stores.prefetch import PrefetchedFiles
from ckptsync.stores.urls import Remote
from ckptsync.tensors import Files
from ckptsync.threads import ThreadPool

PathOrUrl = Path | Remote
_AT_ONCE = 8
_OF_OTHERS = 8 << 20  # bytes kept of what is not merged: configuration, headers of a base model


def list_tree(directory: PathOrUrl, access: Access) -> FileTree:
    """Return all files below a directory. Raises ConfigError if there is nothing, StoreError."""
    if isinstance(directory, Path):
        return directory_files(str(directory))
    is_dated = directory.kind.keeps_times and store_above(directory, access) is None
    return ListedFiles(access.store(directory), is_dated=is_dated)


def top_files(directory: PathOrUrl, access: Access) -> Files:
    """Return the files directly in a directory that the operator named.

    Raise ConfigError, StoreError.
    """
    if isinstance(directory, Path):
        return TopFiles(str(directory), follows_links=True)
    return PrefetchedFiles(Within(ListedFiles(access.store(directory)), ""), _OF_OTHERS)


def nearby_files(directory: PathOrUrl, access: Access, names: Collection[str]) -> Files:
    """Return those of ``names`` that lie directly in a directory.

    The directory was not named by the user, but lies around one that was.

    Elsewhere than here it is not listed: a run may hold thousands of checkpoints. Raises
    ConfigError, Transient.
    """
    if isinstance(directory, Path):
        return TopFiles(str(directory), follows_links=False)
    store, prefix = _over(directory, access)
    with ThreadPool(
        _AT_ONCE if prefix else 1
    ) as pool:  # as many threads as there shall be connections
        sizes = dict(
            zip(names, pool.map(lambda name: _size(store, prefix + name), names), strict=True)
        )
    return StoreFiles(
        store, {name: (prefix + name, size) for name, size in sizes.items() if size is not None}
    )


def store_above(directory: Remote, access: Access) -> Remote | None:
    """Return the directory at or above this one that is a store of ours; raise Transient."""

    def has_store(above: Remote) -> bool:
        store, prefix = _over(above, access)
        return _size(store, prefix + STORE_FILE) is not None

    above = [directory, *parents(directory)]
    _over(directory, access)  # what all of them share is opened once, and not by each thread
    with ThreadPool(_AT_ONCE // 2) as pool:
        return next(
            (
                place
                for place, is_one in zip(above, pool.map(has_store, above), strict=True)
                if is_one
            ),
            None,
        )


def enclosing_store(directory: PathOrUrl, access: Access) -> tuple[Store, tuple[str, ...]] | None:
    """Return the store at or above a directory, opened, and the directory's path below its root.

    None if there is none.  Raises ConfigError, StoreError.
    """
    if isinstance(directory, Remote):
        above = store_above(directory, access)
        if above is None:
            return None
        store = open_store(above.url, access.options_of(above), access.limits)
        return store, pure_path(directory).relative_to(pure_path(above)).parts
    for root in (directory, *directory.parents):
        if is_store(str(root)):
            return open_store(str(root), limits=access.limits), directory.relative_to(root).parts
    return None


def _over(directory: Remote, access: Access) -> tuple[Store, str]:
    """Return a store that has the directory, and the prefix of the directory's names in it.

    There is one store for a whole bucket; elsewhere a new store for each call.

    What is below a directory is reached over no link; what is above it may be one.
    """
    if directory.kind.has_buckets:
        bucket, _, key = directory.rest.partition("/")
        return access.store(Remote(directory.scheme, bucket)), f"{key}/" if key else ""
    return open_any(directory.url, access.options_of(directory), access.limits), ""


def _size(store: Store, name: str) -> int | None:
    """Return the size; None if it is absent, or access is denied.

    Whoever may read a checkpoint may not be allowed to look around it.
    """
    try:
        return store.size(name)
    except Transient:
        raise
    except (NotFound, ConfigError, StoreError):
        return None


def parents(directory: Remote) -> Iterator[Remote]:
    """Yield the directories around it, up to its bucket, or the top of its host."""
    parts = directory.rest.split("/")
    for count in range(len(parts) - 1, 0, -1):
        if count > 1 or directory.kind.has_buckets:
            yield Remote(directory.scheme, "/".join(parts[:count]))


def parent(directory: PathOrUrl) -> PathOrUrl | None:
    """Return the directory around it, if there is one."""
    if isinstance(directory, Path):
        return directory.parent if directory.parent != directory else None
    return next(parents(directory), None)


def pure_path(directory: PathOrUrl) -> PurePath:
    """Return its name taken apart, for whoever asks what it is called."""
    return directory if isinstance(directory, Path) else PurePosixPath(directory.rest)


def without_links(directory: PathOrUrl) -> PathOrUrl:
    """Return the directory without links.

    `Path.resolve` raises RuntimeError on a link to itself before Python 3.13; whoever opens it says
    it better.
    """
    return Path(os.path.realpath(directory)) if isinstance(directory, Path) else directory


def is_inside(directory: PathOrUrl, other: PathOrUrl) -> bool:
    """Return whether a directory is another one, or below it, as far as their names tell."""
    if isinstance(directory, Path) or isinstance(other, Path):
        return (
            isinstance(directory, Path)
            and isinstance(other, Path)
            and directory.is_relative_to(other)
        )
    return directory.scheme == other.scheme and pure_path(directory).is_relative_to(
        pure_path(other)
    )
