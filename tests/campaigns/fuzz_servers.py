"""The door that a server's answers come through: SFTP packets that are not what was asked for."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from ckptsync.errors import Exists
from ckptsync.safe_names import checked_path
from ckptsync.stores.contract import About, Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.sftp import protocol
from tests.campaigns.fuzz import Case, Door, Wrong
from tests.campaigns.fuzz_changes import NAMES
from tests.support.sftp_stores import served

CONTENT = random.Random(5).randbytes(150_000)


def _names(store: Store) -> None:
    for entry in store.names("run/"):
        checked_path(entry.name)
        if not entry.name.startswith("run/") or entry.size < 0 or entry.mtime != entry.mtime:
            raise Wrong(f"lists {entry!r:.300}")


def _dirs(store: Store) -> None:
    for name in store.dirs("run/"):
        if checked_path(name) != name or "/" in name:
            raise Wrong(f"lists the directory {name!r:.300}")


def _size(store: Store) -> None:
    if not 0 <= store.size("run/a") < 1 << 64:
        raise Wrong("a size that cannot be")


def _read(store: Store) -> None:
    out = bytearray(50_000)
    store.read_into("run/a", 1000, memoryview(out))
    if out != CONTENT[1000:51_000]:
        raise Wrong("other bytes are read than the server has")


def _write(store: Store) -> None:
    store.write("run/b", [CONTENT[:1000]])


def _create(store: Store) -> None:
    with contextlib.suppress(Exists):
        store.create("run/b", [CONTENT[:1000]])


def _large(store: Store) -> None:
    store.write("run/c", [CONTENT[:70_000], CONTENT[70_000:]], About(len(CONTENT), "a node's"))


OPERATIONS: Mapping[str, Callable[[Store], None]] = {
    "names": _names,
    "dirs": _dirs,
    "size": _size,
    "read": _read,
    "write": _write,
    "create": _create,
    "large": _large,
    "delete": lambda store: store.delete("run/a"),
}


def _make_sftp(dice: random.Random) -> Case:
    """``changes``: number of the packet, and what of it is replaced by what.

    Whether its length says so.
    """
    changes = []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        insert = dice.choice((b"", b"\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0",
            b"\0\0\0\0", bytes([dice.randrange(99, 107)]), bytes([201]), dice.randbytes(4),
            dice.randbytes(30), dice.choice(NAMES).encode("utf-8", "replace")))  # fmt: skip
        remove = dice.choice((len(insert), len(insert), 0, 1, 4, 1 << 20))
        changes.append(
            [
                dice.randrange(12),
                dice.choice((0, 1, 5, 5, 9, 9, 13, dice.randrange(60))),
                remove,
                insert.hex(),
                dice.randrange(4) > 0,
            ]
        )
    return {"operation": dice.choice(sorted(OPERATIONS)), "changes": changes}


def _run_sftp(case: Case, home: Path) -> str:
    root = home / "store" / "run"
    (root / "b").mkdir(parents=True)
    (root / "a").write_bytes(CONTENT)
    (home / "store" / "changes").write_text(json.dumps(case["changes"]))
    protocol.FSYNC_PATIENCE = 1.0  # it is waited for long while it syncs
    store = served(
        home / "store", f"changes={home}/store/changes", limits=Limits(patience=0.0, stall=1.0)
    )
    # a server that lies of names or bytes cannot be known: manifests say what there is
    with contextlib.suppress(Wrong):
        OPERATIONS[case["operation"]](store)
    return "done"


DOORS: Mapping[str, Door] = {"sftp-answers": Door(_make_sftp, _run_sftp, ("store",))}
