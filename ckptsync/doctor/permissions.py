"""Whether a store lets us do what ckptsync does there: each asked once, with a small file that is gone afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import TypeVar

from ckptsync.doctor.findings import STORAGE, Finding
from ckptsync.errors import CkptsyncError, Exists, NotFound, StoreError, Transient
from ckptsync.records.names import OURS
from ckptsync.stores.contract import About, Store, read_all

FOLDER = f"{OURS}/doctor/"
_SIZE = About(16)
T = TypeVar("T")
WHY = {
    "list": "what is there cannot be found: nothing is consolidated, verified, or seen",
    "create": "no checkpoint can be sent",
    "create-again": "two nodes that send the same name would replace each other's bytes",
    "read": "what was sent cannot be read back: neither proven, nor consolidated, nor repaired",
    "write": "heartbeats, and what two nodes have agreed on, cannot be written anew",
    "delete": "nothing is ever let go of: the store fills up",
}


class _Refused(Exception):
    def __init__(self, permission: str, what: str, hint: str) -> None:
        super().__init__(what)
        self.permission, self.what, self.hint = permission, what, hint


def refused(store: Store, node: str, *, deletes: bool) -> Iterator[Finding]:
    """The first that is refused; raises Transient where nobody answers at all.  ``deletes``: whether the roles here let go of files; a worker never does.

    Where deleting is refused one file stays, always the same one.
    """
    try:
        _try_all(store, node, deletes=deletes)
    except _Refused as e:
        yield Finding("fail", f"store-{e.permission}", (node,), store.url, e.what, WHY[e.permission], e.hint, STORAGE)


def _try_all(store: Store, node: str, *, deletes: bool) -> None:
    first, second = secrets.token_bytes(16), secrets.token_bytes(16)
    _reach(store)
    fresh = f"{FOLDER}{node}~{secrets.token_hex(8)}"
    may_delete = _is_allowed(lambda: store.delete(fresh))
    if deletes and not may_delete:
        _asked("delete", lambda: store.delete(fresh))
    name = fresh if may_delete else f"{FOLDER}{node}"
    try:
        _created(store, name, first, is_new=may_delete)
        _asked("write", lambda: store.write(name, [second], _SIZE))
        _read(store, name, second, "what was written over it")
        if name not in _asked("list", lambda: [entry.name for entry in store.names(FOLDER)]):
            raise _Refused("list", f"{name} was written, and a listing does not show it", "is a cache in between?")
    finally:
        if may_delete:
            _is_allowed(lambda: store.delete(name))
    if may_delete and _is_there(store, name):
        raise _Refused(
            "delete", f"{name} is still there after it was deleted", "look at the store's rules for deleting and keeping"
        )


def _reach(store: Store) -> None:
    """Raises Transient where nobody answers."""
    try:
        list(store.names(FOLDER))
    except Transient:
        raise
    except CkptsyncError as e:
        raise _Refused("list", str(e), e.hint) from e


def _created(store: Store, name: str, content: bytes, *, is_new: bool) -> None:
    try:
        store.create(name, [content], _SIZE)
    except Exists:
        if is_new:
            raise _Refused("create", f"{name} is said to be there, and nobody wrote it", "is a cache in between?") from None
    except CkptsyncError as e:
        raise _Refused("create", str(e), e.hint) from e
    else:
        _read(store, name, content, "what was created")
    try:
        store.create(name, [bytes(16)], _SIZE)
    except Exists:
        return
    except CkptsyncError as e:
        raise _Refused("create-again", str(e), e.hint) from e
    raise _Refused(
        "create-again",
        f"{name} was replaced by a second create",
        "use a store that refuses a name which is taken (S3: If-None-Match)",
    )


def _read(store: Store, name: str, wanted: bytes, what: str) -> None:
    if _asked("read", lambda: read_all(store, name, 1 << 10)) != wanted:
        raise _Refused("read", f"{name} does not read as {what}", "is a cache in between?")


def _asked(permission: str, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except CkptsyncError as e:
        raise _Refused(permission, str(e), e.hint) from e


def _is_allowed(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except StoreError:
        return False
    return True


def _is_there(store: Store, name: str) -> bool:
    try:
        store.size(name)
    except NotFound:
        return False
    return True
