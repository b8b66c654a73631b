"""Open what is at a path or URL that an operator named, as files to read.

Commands take a directory of this machine or a URL alike, and a checkpoint's meaning may depend on
what lies above it: a store, a run, a base model. `PathOrUrl` is the one type for both, and each
function here answers one question about it. Nothing is listed above the named directory, since a
run may hold thousands of checkpoints.
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
_AT_ONCE = 8  # requests
# bytes that are cached of files that are not merged: configuration, headers of a base model
_CACHED = 8 << 20


def list_tree(directory: PathOrUrl, access: Access) -> FileTree:
    """List all files below a directory; return them as they were listed.

    A local directory may have none. Raise ConfigError if it is missing, has only links, or a store
    lists nothing in it; Incomplete if a merge into it has not ended; StoreError.
    """
    if isinstance(directory, Path):
        return directory_files(str(directory))
    is_dated = directory.kind.keeps_times and store_above(directory, access) is None
    return ListedFiles(access.store(directory), is_dated=is_dated)


def top_files(directory: PathOrUrl, access: Access) -> Files:
    """Return the files directly in a directory that the operator named, listed now.

    Links in a local one are followed; all of a remote one is listed. Raise as `list_tree`.
    """
    if isinstance(directory, Path):
        return TopFiles(str(directory), follows_links=True)
    return PrefetchedFiles(Within(ListedFiles(access.store(directory)), ""), _CACHED)


def nearby_files(directory: PathOrUrl, access: Access, names: Collection[str]) -> Files:
    """Return the files directly in a directory near one that the user named.

    Of a remote directory, those of ``names``: threads look each name up; one to which access is
    denied counts as absent. Of a local one, all; links are not followed. Raise ConfigError,
    Transient.
    """
    if isinstance(directory, Path):
        return TopFiles(str(directory), follows_links=False)
    store, prefix = _store_and_prefix(directory, access)
    # each thread may open a connection; a store without a prefix was opened for this call alone
    with ThreadPool(_AT_ONCE if prefix else 1) as pool:
        sizes = dict(
            zip(
                names,
                pool.map(lambda name: _size_or_none(store, prefix + name), names),
                strict=True,
            )
        )
    return StoreFiles(
        store, {name: (prefix + name, size) for name, size in sizes.items() if size is not None}
    )


def store_above(directory: Remote, access: Access) -> Remote | None:
    """Return the nearest directory, at or above this one, that is a store; None without one.

    Several threads look in each. One that denies access counts as none. Raise ConfigError,
    Transient.
    """

    def has_store(candidate: Remote) -> bool:
        """Return whether a directory has the file that marks a store. Raise Transient."""
        store, prefix = _store_and_prefix(candidate, access)
        return _size_or_none(store, prefix + STORE_FILE) is not None

    candidates = [directory, *parents(directory)]
    # opens what all candidates share, once and not in each thread
    _store_and_prefix(directory, access)
    with ThreadPool(_AT_ONCE // 2) as pool:
        return next(
            (
                candidate
                for candidate, is_marked in zip(
                    candidates, pool.map(has_store, candidates), strict=True
                )
                if is_marked
            ),
            None,
        )


def enclosing_store(directory: PathOrUrl, access: Access) -> tuple[Store, tuple[str, ...]] | None:
    """Return the store at or above a directory, opened, and the directory's path below its root.

    None if there is no store. Each directory above is looked into. Raise ConfigError, StoreError,
    and as `open_store`.
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


def _store_and_prefix(directory: Remote, access: Access) -> tuple[Store, str]:
    """Return a store that has the directory, and the prefix of the directory's names in it.

    There is one store for a whole bucket; elsewhere the directory becomes a store, opened anew by
    each call: links below a store's root are not followed, but its root may be reached over links.
    Raise ConfigError, Unsupported.
    """
    if directory.kind.has_buckets:
        bucket, _, key = directory.rest.partition("/")
        return access.store(Remote(directory.scheme, bucket)), f"{key}/" if key else ""
    return open_any(directory.url, access.options_of(directory), access.limits), ""


def _size_or_none(store: Store, name: str) -> int | None:
    """Return the size; None after any error but Transient: the file is absent, or access denied.

    Whoever may read a checkpoint may not be allowed to read around it.
    """
    try:
        return store.size(name)
    except Transient:
        raise
    except (NotFound, ConfigError, StoreError):
        return None


def parents(directory: Remote) -> Iterator[Remote]:
    """Yield the directories above a URL, nearest first, up to its bucket or its host's top."""
    parts = directory.rest.split("/")
    for count in range(len(parts) - 1, 0, -1):
        if count > 1 or directory.kind.has_buckets:
            yield Remote(directory.scheme, "/".join(parts[:count]))


def parent(directory: PathOrUrl) -> PathOrUrl | None:
    """Return the directory above, or None at the top."""
    if isinstance(directory, Path):
        return directory.parent if directory.parent != directory else None
    return next(parents(directory), None)


def pure_path(directory: PathOrUrl) -> PurePath:
    """Return the path, or the URL's text after its scheme, as a path to take apart."""
    return directory if isinstance(directory, Path) else PurePosixPath(directory.rest)


def without_links(directory: PathOrUrl) -> PathOrUrl:
    """Return the directory with its links resolved; a URL unchanged.

    `Path.resolve` raises RuntimeError on a link to itself before Python 3.13; opening the directory
    gives a better error.
    """
    return Path(os.path.realpath(directory)) if isinstance(directory, Path) else directory


def is_inside(directory: PathOrUrl, container: PathOrUrl) -> bool:
    """Return whether a directory is ``container`` or below it, by their names, links unresolved.

    False for a path and a URL, or two schemes.
    """
    if isinstance(directory, Path) or isinstance(container, Path):
        return (
            isinstance(directory, Path)
            and isinstance(container, Path)
            and directory.is_relative_to(container)
        )
    return directory.scheme == container.scheme and pure_path(directory).is_relative_to(
        pure_path(container)
    )
