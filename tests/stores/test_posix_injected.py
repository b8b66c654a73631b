"""A directory store whose every system call fails once, in a real process, by strace: what it says,
and what it leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.stores.contract import read_all
from ckptsync.stores.posix.draft import is_unfinished
from ckptsync.stores.posix.store import PosixStore
from tests.campaigns.kill import can_trap
from tests.support.exhaustive import ALL
from tests.support.strace_faults import CALLS, NEW, OTHER, Outcome, injected, outcomes_of

pytestmark = pytest.mark.skipif(
    not can_trap(), reason="strace is not installed, or may not trace here"
)
CHANGES = [call for call in CALLS if call.split()[0] in ("write", "replace", "create", "delete")]
ERRORS = ["ENOSPC", "EIO", "EDQUOT", "ESTALE", "EACCES", "EROFS"]
FEW = ["pwrite64", "renameat", "linkat", "mkdirat"]  # each of these fails in each of these ways
# each of these in one of them
MANY = ["fsync", "close", "openat", "newfstatat", "unlinkat", "flock"]
RESULTS: dict[str, dict[str, bytes | None]] = {
    "write run/a": {"run/a": NEW},
    "replace run/a": {"run/a": OTHER},
    "create run/dir/b": {"run/dir/b": NEW},
    "delete run/a": {"run/a": None},
}


def faulty(home: Path, call: str) -> Iterator[tuple[Path, list[Outcome]]]:
    """All changes of an empty store, with a fault in the first system call of this name, then in
    the second, until there are no more of them.
    """
    first, every = (2, 2) if call == "close" else (1, 2) if call in FEW else (1, 5)
    for n in itertools.count(1, 1) if ALL else itertools.count(first, every):
        drawn = ERRORS[n % 4 if call in FEW else n % len(ERRORS)]
        for error in ERRORS[:4] if call in FEW and ALL else [drawn]:
            root = home / f"{n}-{error}"
            root.mkdir()
            found, is_met = injected(root, f"{call}:error={error}:when={n}", CHANGES)
            if not is_met:
                return
            yield root, found


def held(root: Path) -> dict[str, bytes]:
    store = PosixStore(str(root))
    return {entry.name: read_all(store, entry.name) for entry in store.names("")}


def unfinished(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if is_unfinished(path.name)]


def may_hold(outcomes: list[Outcome]) -> list[dict[str, bytes]]:
    """By what was acknowledged; a call that failed may have happened."""
    worlds: list[dict[str, bytes | None]] = [{}]
    for outcome in outcomes:
        done = [world | RESULTS[outcome.call] for world in worlds]
        worlds = done if not outcome.error else [*worlds, *done]
    return [
        {name: content for name, content in world.items() if content is not None}
        for world in worlds
    ]


@pytest.mark.parametrize("call", [*FEW, *MANY])
def test_whatever_call_fails_what_was_acknowledged_is_there_and_nothing_else(
    tmp_path: Path, call: str
) -> None:
    met: list[Outcome | None] = []
    for root, outcomes in faulty(tmp_path, call):
        assert held(root) in may_hold(outcomes), outcomes
        failed = [outcome for outcome in outcomes if outcome.error]
        met += failed or [None]
        for outcome in failed:
            assert f"in the store {root}" in outcome.text or f"{root}: " in outcome.text, outcome
            assert outcome.hint, outcome
        if call != "unlinkat" and "Transient" not in {outcome.error for outcome in failed}:
            assert unfinished(root) == [], outcomes
        again = list(outcomes_of(root, [outcome.call for outcome in failed]))
        assert {outcome.error for outcome in again} <= {"", "Exists"}, again
        assert call == "unlinkat" or unfinished(root) == [], outcomes
    assert met, "no call of this name was met"
    if call == "close":  # NFS tells there that the disk is full
        calls = {outcome.call for outcome in met if outcome}
        # the sample is every second close: if a close was added or removed, begin at another one
        assert calls == set(CHANGES) - {"delete run/a"}


@pytest.mark.parametrize(
    ("fault", "call", "error"),
    [
        ("openat:error=ENOENT:when=3", "size run/a", ""),  # the root, run, run/a: asked for again
        ("openat:error=ENOENT:when=3", "read run/a", ""),
        # and again, after the two directories were
        ("openat:error=ENOENT:when=3+5", "size run/a", "NotFound"),
        ("openat:error=ESTALE:when=2", "read run/a", ""),
        ("/^preadv:error=ESTALE:when=1", "read run/a", ""),
        ("/^preadv:error=ESTALE", "read run/a", "Transient"),
        ("/^preadv:error=EIO", "read run/a", "Transient"),
        ("/^preadv:retval=0:when=1", "read run/a", ""),  # its length as it was remembered
        ("/^preadv:retval=0", "read run/a", "Corrupt"),
    ],
)
def test_on_nfs_what_seems_missing_short_or_forgotten_is_opened_again(
    tmp_path: Path, fault: str, call: str, error: str
) -> None:
    PosixStore(str(tmp_path)).write("run/a", [NEW])
    (found,), is_met = injected(tmp_path, fault, [call], "nfs")
    assert (is_met, found.error) == (True, error), found
    assert error or found.value in (len(NEW), NEW.decode())


def test_on_a_disk_what_is_missing_is_missing_and_an_io_error_is_a_broken_disk(
    tmp_path: Path,
) -> None:
    PosixStore(str(tmp_path)).write("run/a", [NEW])
    (found,), _ = injected(tmp_path, "/^preadv:error=EIO", ["read run/a"])
    assert (found.error, "dmesg" in found.hint) == ("StoreError", True)
    (found,), _ = injected(tmp_path, "newfstatat:error=ENOENT", ["size run/a"])
    assert found.error == "NotFound"


def test_a_directory_whose_names_cannot_be_read_is_not_empty(tmp_path: Path) -> None:
    PosixStore(str(tmp_path)).write("run/a", [NEW])
    (found,), is_met = injected(tmp_path, "getdents64:error=EIO:when=1", ["names"])
    assert (is_met, found.error) == (True, "StoreError"), found
