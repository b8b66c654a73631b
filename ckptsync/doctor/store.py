"""Checks of the store as this node uses it: whether it can be reached, which operations it refuses, how far its clock is off, and its directory.

Each operation is tried with a small file in ``.ckptsync/doctor/``, which is removed again.  Where a worker may not delete, one file stays, always the same.
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
from ckptsync.doctor import directories
from ckptsync.doctor.directories import foreign_owner, is_directory, newest_checkpoint, not_tried, reason, size_of
from ckptsync.doctor.facts import SETUP, STORAGE, Finding, fail, warn
from ckptsync.errors import CkptsyncError, ConfigError, Exists, NotFound, StoreError, Transient
from ckptsync.records.names import OURS, clock_name
from ckptsync.spool import folders
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import NoParent, bare, create_store, has_root
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import OURS as SPOOL
from ckptsync.worker.clock import DAY, measure
from ckptsync.worker.node import umask

OPERATIONS = {
    "list": "files in the store are not found: nothing is consolidated, verified or shown",
    "create": "no checkpoint can be uploaded",
    "create-again": "two nodes that upload the same name would replace each other's bytes",
    "read": "uploaded files cannot be read back: neither verified, nor consolidated, nor repaired",
    "write": "heartbeats, and what nodes have agreed on, cannot be written anew",
    "delete": "nothing is ever deleted: the store fills up",
}
_FOLDER = f"{OURS}/doctor/"
_SIZE = About(16)
_PATIENCE = 2.0  # seconds to try again: S3 tells its region, and its time, by a refusal
_STALL = 10.0  # seconds without a byte: nobody who asks what is wrong waits as long as an upload does
_EVER = 40 * 365 * DAY  # a node may boot in the year of its firmware; a store that is farther off tells no time
_LONGEST_URL = 64 * 1024  # bytes
_NOTHING = "no checkpoint is uploaded"


@dataclass(frozen=True, slots=True)
class Target:
    """A store as it is configured.  ``deletes``: whether the roles of this machine delete files there."""

    url: str
    options: Mapping[str, object]
    limits: Limits
    deletes: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """``store``: the store if it can be used.  ``clock``: seconds by which this node's clock is ahead of it, ``None`` where that cannot be told."""

    findings: tuple[Finding, ...]
    store: Store | None = None
    clock: float | None = None


def refusal(e: CkptsyncError, kind: str, node: str, subject: str, why: str) -> Finding:
    """Return an error as a failure."""
    code = STORAGE if isinstance(e, StoreError) else SETUP
    return fail(kind, node, subject, str(e).removeprefix(f"{subject}: "), why=why, hint=e.hint or "read what it says", code=code)


def check_store(target: Target, node: str, output_dirs: Iterable[Path], *, creates: bool = False) -> Checked:
    """Check a store.  ``creates``: make a store that is not there yet, as the first worker would; one that was there before is not made anew."""
    try:
        where = located(target.url)
        if isinstance(where, Path) and (owner := foreign_owner(where)):
            return Checked((replace(not_tried(where, owner, node), level="fail"),))
        store = open_anyway(target)
        if store is None and creates and not _served(target.url, output_dirs):
            create_store(target.url, _options(target), _hasty(target))
            store = open_anyway(target)
        if store is None:
            return Checked(tuple(_check_absent(target.url, node, output_dirs)))
        refused = tuple(_check_operations(store, node, deletes=target.deletes))
        found = tuple(_check_directory(target.url, node, output_dirs, is_usable=not refused))
        if refused or any(f.kind == "store-create" for f in found):
            return Checked((*refused, *found))
        return Checked(found, store, clock_ahead(store, node))
    except NoParent as e:
        return Checked((refusal(e, "store-absent", node, _shown(target.url), _NOTHING),))
    except CkptsyncError as e:
        return Checked((refusal(e, "store-unreachable", node, _shown(target.url), _NOTHING),))


def open_anyway(target: Target) -> Store | None:
    """Return what is at a URL, without asking whether it is a store of ours; ``None`` if there is nothing.  Raises CkptsyncError."""
    where = located(target.url)
    try:
        if isinstance(where, Path) and not where.is_dir():
            return None
    except OSError as e:
        raise StoreError(f"{where}: {reason(e)}", hint="look at the directories above it") from e
    found = bare(target.url, _options(target), _hasty(target))
    return found if has_root(found) else None


def clock_ahead(store: Store, node: str) -> float:
    """Return how many seconds this node's clock is ahead of the store's.  Raises StoreError."""
    name = f"{node}~doctor"  # not the worker's own, which it may be using now
    try:
        return measure(store, name, _EVER) / 1e9
    finally:
        with contextlib.suppress(StoreError):  # a worker may not be allowed to delete: then it stays, and is written over
            store.delete(clock_name(name))


def _hasty(target: Target) -> Limits:
    return replace(target.limits, patience=_PATIENCE, stall=min(target.limits.stall, _STALL))


def _options(target: Target) -> Mapping[str, object]:
    return options_for(target.url, target.options) if isinstance(located(target.url), Remote) else {}


def _shown(url: str) -> str:
    """Return a store's URL; of one that is refused, as for a password in it, no more than its scheme."""
    try:
        located(url)
    except ConfigError:
        return f"{url.partition('://')[0]}://…" if "://" in url else url
    return url


def _served(url: str, output_dirs: Iterable[Path]) -> list[Path]:
    """Return the output directories whose worker served this very store last."""
    where = located(url)
    wanted, found = where.url if isinstance(where, Remote) else str(where), []
    for path in output_dirs:
        with contextlib.suppress(OSError):
            last = (folders.read(path / SPOOL / "store", _LONGEST_URL) or b"").decode("utf-8", "replace").strip()
            found += [path] if last == wanted else []
    return found


def _check_absent(url: str, node: str, output_dirs: Iterable[Path]) -> Iterator[Finding]:
    where, hint = located(url), "is the file system mounted, and the path right?"
    if served := _served(url, output_dirs):
        what = f"not there, and was when the worker last served {served[0]}"
        yield fail("store-absent", node, url, what, why="the worker waits for it to come back", hint=hint, code=STORAGE)
    elif isinstance(where, Remote):
        why = f"the first worker or `ckptsync push` makes it, if the directory above it is there: {where.rest.rpartition('/')[0]}"
        yield warn("store-absent", node, url, "not there", why=why, hint=hint, code=STORAGE)
    elif not is_directory(where.parent):
        why = f"no store is made without the directory above it, {where.parent}: a worker waits for that, and `ckptsync push` fails"
        yield warn(
            "store-absent", node, url, "not there", why=why, hint=f"{hint}  If both are: mkdir -p {where.parent}", code=STORAGE
        )


def _check_directory(url: str, node: str, output_dirs: Iterable[Path], *, is_usable: bool) -> Iterator[Finding]:
    """Check a store that is a directory: rights, its file system, room for the largest of the newest checkpoints here, and its group."""
    where = located(url)
    if isinstance(where, Remote):
        return
    if is_usable and not os.access(where, os.W_OK | os.X_OK):
        what, hint = f"{where}: no directory of a run can be made there", "let this user, or a group that it is in, write there"
        yield fail("store-create", node, url, what, why=OPERATIONS["create"], hint=hint, code=STORAGE)
    yield from directories.check_mount(where, node)
    newest = [found for path in output_dirs if is_directory(path) and (found := newest_checkpoint(path))]
    yield from directories.check_space(where, max(newest, key=size_of, default=None), node)
    mask = int(umask() or "0", 8)
    if where.stat().st_mode & stat.S_ISGID and mask & 0o040:
        why = "the store is a group's: the head and other users could not read uploaded files"
        yield warn("umask", node, url, f"umask {mask:04o}", why=why, hint="umask 0002 (UMask= of a unit)")


class _Refused(Exception):
    def __init__(self, operation: str, what: str, hint: str) -> None:
        super().__init__(what)
        self.operation, self.what, self.hint = operation, what, hint


@contextlib.contextmanager
def _trying(operation: str) -> Iterator[None]:
    try:
        yield
    except Exists:
        raise
    except CkptsyncError as e:
        raise _Refused(operation, str(e), e.hint) from e


def _check_operations(store: Store, node: str, *, deletes: bool) -> Iterator[Finding]:
    """Yield the first operation that a store refuses.  Raises Transient where nobody answers at all."""
    try:
        _try_operations(store, node, deletes=deletes)
    except _Refused as e:
        yield fail(f"store-{e.operation}", node, store.url, e.what, why=OPERATIONS[e.operation], hint=e.hint, code=STORAGE)


def _try_operations(store: Store, node: str, *, deletes: bool) -> None:
    try:
        list(store.names(_FOLDER))
    except Transient:
        raise
    except CkptsyncError as e:
        raise _Refused("list", str(e), e.hint) from e
    name, may_delete = f"{_FOLDER}{node}~{secrets.token_hex(8)}", True
    try:
        store.delete(name)
    except StoreError as e:
        if deletes:
            raise _Refused("delete", str(e), e.hint) from e
        name, may_delete = f"{_FOLDER}{node}", False
    try:
        _try_create(store, name, is_new=may_delete)
        content = secrets.token_bytes(16)
        with _trying("write"):
            store.write(name, [content], _SIZE)
        _try_read(store, name, content)
        with _trying("list"):
            listed = [entry.name for entry in store.names(_FOLDER)]
        if name not in listed:
            raise _Refused("list", f"{name} was written, and a listing does not show it", "is a cache in between?")
    finally:
        if may_delete:
            with contextlib.suppress(StoreError):
                store.delete(name)
    with contextlib.suppress(NotFound):
        if may_delete and store.size(name) is not None:
            hint = "look at the store's rules for deleting and keeping"
            raise _Refused("delete", f"{name} is still there after it was deleted", hint)


def _try_create(store: Store, name: str, *, is_new: bool) -> None:
    content = secrets.token_bytes(16)
    try:
        with _trying("create"):
            store.create(name, [content], _SIZE)
    except Exists:
        if is_new:
            raise _Refused("create", f"{name} is said to be there, and nobody wrote it", "is a cache in between?") from None
    else:
        _try_read(store, name, content)
    try:
        with _trying("create-again"):
            store.create(name, [bytes(16)], _SIZE)
    except Exists:
        return
    hint = "use a store that refuses a name which is taken (S3: If-None-Match)"
    raise _Refused("create-again", f"{name} was replaced by a second create", hint)


def _try_read(store: Store, name: str, content: bytes) -> None:
    with _trying("read"):
        found = read_all(store, name, 1 << 10)
    if found != content:
        raise _Refused("read", f"{name} does not read as it was written", "is a cache in between?")
