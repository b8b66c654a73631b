"""Checks of the store as this node uses it: reach, operations, clock, directory.

Credentials and proxies can allow some operations and refuse others, so each one is tried with a
small file in ``.ckptsync/doctor/``, which is removed again.  If a worker may not delete, one file
per node stays there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.config.loading import options_for
from ckptsync.doctor import directory_checks
from ckptsync.doctor.directory_checks import is_directory, newest_checkpoint, reason, size_of
from ckptsync.doctor.findings import STORAGE, Finding, fail, refusal, warn
from ckptsync.errors import CkptsyncError, ConfigError, Exists, NotFound, StoreError, Transient
from ckptsync.records.store_paths import clock_name
from ckptsync.safe_names import RECORDS
from ckptsync.spool import safe_files
from ckptsync.stores.clock import DAY, measure_offset
from ckptsync.stores.contract import About, Store, has_root, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import NoParent, create_store, open_any
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import SPOOL
from ckptsync.worker.node_identity import umask

OPERATIONS = {
    "list": "files in the store are not found: nothing is consolidated, verified or shown",
    "create": "no checkpoint can be uploaded",
    "create-again": "two nodes that upload the same name would replace each other's bytes",
    "read": "uploaded files cannot be read back: neither verified, nor consolidated, nor repaired",
    "write": "heartbeats, and what nodes have agreed on, cannot be written anew",
    "delete": "nothing is ever deleted: the store fills up",
}
_FOLDER = f"{RECORDS}/doctor/"
_SIZE = About(16)
_PATIENCE = 2.0  # seconds to try again: S3 tells its region, and its time, by a refusal
# seconds without a byte: nobody who asks what is wrong waits as long as an upload does
_STALL = 10.0
# a node may boot in the year of its firmware; a store that is farther off tells no time
_EVER = 40 * 365 * DAY
_LONGEST_URL = 64 * 1024  # bytes
_NOTHING = "no checkpoint is uploaded"
_MOUNT = "mount the file system, or correct the path"
_CACHE = "bypass the proxy or cache between this node and the store"


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """A store as it is configured; ``deletes``: whether this machine's roles delete files there."""

    url: str
    options: Mapping[str, object]
    limits: Limits
    deletes: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """The findings about a store, and the ``store`` itself if it can be used.

    ``clock``: seconds by which this node's clock is ahead of the store's, None if not measured.
    """

    findings: tuple[Finding, ...]
    store: Store | None = None
    clock: float | None = None


def check_store(
    target: StoreTarget, node: str, output_dirs: Iterable[Path], *, creates: bool = False
) -> Checked:
    """Check that a store can be reached, does every operation, and has room; measure its clock.

    Without a store, or if an operation fails, the result has no ``store`` and no ``clock``.  Any
    CkptsyncError is a finding.  Small files are written and removed; root tries nothing in another
    user's directory, which is a failure here.

    Args:
        target: the store.
        node: this node's id, for the names of trial files.
        output_dirs: whose spools say whether the store existed before, and whose checkpoints must
            fit.
        creates: make a store that does not exist yet, as the first worker would, unless one existed
            before.

    """
    try:
        path_or_url = located(target.url)
        if isinstance(path_or_url, Path) and (
            refused := list(directory_checks.check_root(path_or_url))
        ):
            return Checked(tuple(replace(finding, level="fail") for finding in refused))
        store = open_unchecked(target)
        if store is None and creates and not _served(target.url, output_dirs):
            create_store(*_access(target))
            store = open_unchecked(target)
        if store is None:
            return Checked(tuple(_check_absent(target.url, output_dirs)))
        refused = list(_check_operations(store, node, deletes=target.deletes))
        findings = list(_check_directory(target.url, output_dirs, is_usable=not refused))
        if refused or any(f.kind == "store-create" for f in findings):
            return Checked((*refused, *findings))
        return Checked(tuple(findings), store, measure_clock(store, node))
    except NoParent as e:
        return Checked((refusal(e, "store-absent", _shown(target.url), _NOTHING),))
    except CkptsyncError as e:
        return Checked((refusal(e, "store-unreachable", _shown(target.url), _NOTHING),))


def open_unchecked(target: StoreTarget) -> Store | None:
    """Return the store at a URL, whether it has records or not; None if there is nothing.

    Raises CkptsyncError.
    """
    path_or_url = located(target.url)
    try:
        if isinstance(path_or_url, Path) and not path_or_url.is_dir():
            return None
    except OSError as e:
        raise StoreError(
            f"{path_or_url}: {reason(e)}", hint="check the directories above it"
        ) from e
    store = open_any(*_access(target))
    return store if has_root(store) else None


def measure_clock(store: Store, node: str) -> float:
    """Return the seconds by which this node's clock is ahead of the store's.

    Writes a file in the store, and removes it if it may.  Raises StoreError.
    """
    name = f"{node}~doctor"  # not the worker's own, which it may be using now
    try:
        return measure_offset(store, clock_name(name), _EVER) / 1e9
    finally:
        # a worker may not be allowed to delete: then it stays, and is written over
        with contextlib.suppress(StoreError):
            store.delete(clock_name(name))


def _access(target: StoreTarget) -> tuple[str, Mapping[str, object], Limits]:
    """Return URL, options, and limits with short retries and timeouts.  Raises ConfigError."""
    is_remote = isinstance(located(target.url), Remote)
    options = options_for(target.url, target.options) if is_remote else {}
    stall = min(target.limits.stall, _STALL)
    return target.url, options, replace(target.limits, patience=_PATIENCE, stall=stall)


def _shown(url: str) -> str:
    """Return a store's URL, or its scheme alone if it is refused, as for a password in it."""
    try:
        located(url)
    except ConfigError:
        return f"{url.partition('://')[0]}://…" if "://" in url else url
    return url


def _served(url: str, output_dirs: Iterable[Path]) -> list[Path]:
    """Return the output directories whose spool records this store; skip unreadable ones.

    Raises ConfigError if the URL is refused.
    """
    path_or_url = located(url)
    expected, served = path_or_url.url if isinstance(path_or_url, Remote) else str(path_or_url), []
    for path in output_dirs:
        with contextlib.suppress(OSError):
            last = safe_files.read(path / SPOOL / "store", _LONGEST_URL) or b""
            served += [path] if last.decode("utf-8", "replace").strip() == expected else []
    return served


def _check_absent(url: str, output_dirs: Iterable[Path]) -> Iterator[Finding]:
    """Yield the finding of a missing store; none if the first worker can make it.

    It is a failure if a worker here used it before, and else a warning.
    """
    path_or_url, what, hint, level = located(url), "not found", _MOUNT, warn
    if served := _served(url, output_dirs):
        level, why = fail, "the worker waits for it to come back"
        what = f"not found; the worker of {served[0]} used it before"
    elif isinstance(path_or_url, Remote):
        above = path_or_url.rest.rpartition("/")[0]
        why = f"the first worker or `ckptsync push` makes it, if {above} exists"
    elif is_directory(path_or_url.parent):
        return
    else:
        why = f"no store is made, since the directory above it does not exist: {path_or_url.parent}"
        hint = f"{_MOUNT}, or mkdir -p {path_or_url.parent}"
    yield level("store-absent", url, what, why=why, hint=hint, code=STORAGE)


def _check_directory(
    url: str, output_dirs: Iterable[Path], *, is_usable: bool
) -> Iterator[Finding]:
    """Yield the findings on a store that is a directory: rights, mount, room, umask.

    Yields nothing for a URL.  ``is_usable``: every operation of a file succeeded.  Raises
    ConfigError.
    """
    path_or_url = located(url)
    if isinstance(path_or_url, Remote):
        return
    if is_usable and not os.access(path_or_url, os.W_OK | os.X_OK):
        what, why = f"{path_or_url}: no directory of a run can be made there", OPERATIONS["create"]
        hint = "let this user, or a group that it is in, write there"
        yield fail("store-create", url, what, why=why, hint=hint, code=STORAGE)
    yield from directory_checks.check_mount(path_or_url)
    newest_checkpoints = [newest_checkpoint(path) for path in output_dirs if is_directory(path)]
    newest = max(filter(None, newest_checkpoints), key=size_of, default=None)
    yield from directory_checks.check_space(path_or_url, newest)
    mask = int(umask() or "0", 8)
    if path_or_url.stat().st_mode & stat.S_ISGID and mask & 0o040:
        what, hint = f"umask {mask:04o}", "umask 0002 (UMask= of a unit)"
        why = "the store is a group's: the head and other users could not read uploaded files"
        yield warn("umask", url, what, why=why, hint=hint)


def _check_operations(store: Store, node: str, *, deletes: bool) -> Iterator[Finding]:
    """Yield the first operation that a store refuses, or does wrongly.

    Raises Transient if it does not answer at all.
    """
    if refused := _first_refused(store, node, deletes=deletes):
        operation, what, hint = refused
        why, hint = OPERATIONS[operation], hint or "see the error message"
        yield fail(f"store-{operation}", store.url, what, why=why, hint=hint, code=STORAGE)


def _first_refused(store: Store, node: str, *, deletes: bool) -> tuple[str, str, str] | None:
    """Return the first key of `OPERATIONS` that fails, what happened, and a hint; None if all work.

    Tries them on a file of this node below `_FOLDER`, which stays if it cannot be deleted.
    ``deletes``: a failed deletion counts. Raises Transient if a listing is not answered.
    """
    name, may_delete = f"{_FOLDER}{node}~{secrets.token_hex(8)}", False
    first, second = secrets.token_bytes(16), secrets.token_bytes(16)
    operation = "list"
    try:
        list(store.names(_FOLDER))
        try:
            store.delete(name)
            may_delete = True
        except StoreError as e:
            if deletes:
                return "delete", str(e), e.hint
            name = f"{_FOLDER}{node}"
        operation, is_new = "create", True
        try:
            store.create(name, [first], _SIZE)
        except Exists:
            is_new = False
            if may_delete:
                return operation, f"{name} is new, and the store says that it exists", _CACHE
        operation = "read"
        if is_new and read_all(store, name, 1 << 10) != first:
            return operation, f"{name} does not read as it was written", _CACHE
        operation = "create-again"
        with contextlib.suppress(Exists):
            store.create(name, [bytes(16)], _SIZE)
            hint = "use a store that refuses a name which is taken (S3: If-None-Match)"
            return operation, f"{name} was replaced by a second create", hint
        operation = "write"
        store.write(name, [second], _SIZE)
        operation = "read"
        if read_all(store, name, 1 << 10) != second:
            return operation, f"{name} does not read as it was written", _CACHE
        operation = "list"
        if name not in [entry.name for entry in store.names(_FOLDER)]:
            return operation, f"{name} was written, and a listing does not show it", _CACHE
    except CkptsyncError as e:
        if operation == "list" and isinstance(e, Transient):
            raise
        return operation, str(e), e.hint
    finally:
        if may_delete:
            with contextlib.suppress(StoreError):
                store.delete(name)
    with contextlib.suppress(NotFound):
        if may_delete and store.size(name) is not None:
            hint = "check the store's rules for deleting and keeping"
            return "delete", f"{name} still exists after it was deleted", hint
    return None
