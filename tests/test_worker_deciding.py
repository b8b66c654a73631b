"""What to send and where: pure decisions over manifests."""

from __future__ import annotations

from dataclasses import replace

from ckptsync.digest import digest
from ckptsync.model import Demands
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.saves import Known
from ckptsync.records.tombstone import Tombstone
from ckptsync.walk import Stat
from ckptsync.worker.deciding import displaced, has_mate, holder, is_retired, missing, span, stored

S = 10**9


def entry(path: str, content: str, mtime: int = 0) -> FileEntry:
    return FileEntry(path, len(content), digest(content.encode()), 1 << 14, (), mtime)


def manifest(node: str, n: int = 0, place: str = "c-1", at: int = 0, **files: str) -> Manifest:
    entries = tuple(entry(p, c, at) for p, c in files.items())
    return Manifest("run", "c-1", place, node, n, entries, (), at, at, Demands())


def stats(at: int = 0, **files: str) -> tuple[Stat, ...]:
    return tuple(Stat(p, len(c), at, n, 0) for n, (p, c) in enumerate(files.items()))


def test_small_files_go_first_and_what_is_bound_by_us_goes_not_at_all() -> None:
    ours = manifest("n0", a="xxx", b="x", c="xx")
    assert [p.name for p in missing(ours, [])] == ["run/c-1/b", "run/c-1/c", "run/c-1/a"]
    assert [p.entry.path for p in missing(ours, [manifest("n0", b="x")])] == ["c", "a"]
    assert all(p.is_shared for p in missing(ours, []))


def test_the_same_file_of_another_node_is_vouched_for() -> None:
    (parcel,) = missing(manifest("n1", a="x"), [manifest("n0", a="x")])
    assert (parcel.name, parcel.is_bound, parcel.is_shared) == ("run/c-1/a", True, False)


def test_other_bytes_of_a_larger_node_lie_beside_and_of_a_smaller_one_displace() -> None:
    (larger,) = missing(manifest("n1", a="y"), [manifest("n0", a="x")])
    assert (larger.name, larger.is_shared, larger.moves) == ("run/.ckptsync/c-1/files/n1/a", False, ())
    (smaller,) = missing(manifest("n0", a="y"), [manifest("n1", a="x"), manifest("n2", a="x")])
    assert smaller.name == "run/c-1/a"
    assert [name for name, _ in smaller.moves] == [f"run/.ckptsync/c-1/files/{n}/a" for n in ("n1", "n2")]
    assert {e.digest for _, e in smaller.moves} == {digest(b"x")}


def test_a_displaced_file_is_due_beside_the_checkpoint_until_it_is_there() -> None:
    there = [manifest("n0", a="y"), manifest("n1", a="xx")]
    (due,) = displaced("n1", there, {})
    assert displaced("n0", there, {}) == ()
    assert displaced("n1", there, {due.name: 2}) == ()
    assert displaced("n1", there, {due.name: 1}) == (due,)


def test_files_are_stored_if_one_place_of_one_node_has_them_all() -> None:
    told = [manifest("n0", a="x"), manifest("n0", 1, b="y"), manifest("n1", c="z"), manifest("n0", place="c-1~2", c="z")]
    assert stored([entry("a", "x"), entry("b", "y")], told) is not None
    assert stored([entry("a", "x"), entry("c", "z")], told) is None
    assert stored([entry("a", "y")], told) is None
    assert stored([], told) is None
    assert holder(stats(a="x", b="y"), told) is not None
    assert holder(stats(at=1, a="x"), told) is None


def test_a_mate_is_of_the_same_time_on_the_stores_clock() -> None:
    mate = manifest("n1", at=100 * S, a="x")
    assert has_mate(stats(at=100 * S, b="y"), "n0", 0, [mate])
    assert has_mate(stats(at=130 * S, b="y"), "n0", 30 * S, [mate])
    assert not has_mate(stats(at=130 * S, b="y"), "n0", 0, [mate])
    assert not has_mate(stats(at=70 * S, b="y"), "n0", 0, [mate])
    assert not has_mate(stats(at=100 * S, b="y"), "n1", 0, [mate])
    assert not has_mate((), "n0", 0, [mate])


def test_given_up_is_what_a_tombstone_names_or_what_is_older_than_one_whose_manifest_is_gone() -> None:
    ours, name = manifest("n0", at=5 * S, a="x"), "run/.ckptsync/c-1/manifest-n0-0-0123456789abcdef.json"
    buried = {"t": (Tombstone("run", "c-1", "c-1", 0, (name,), ""), 10.0)}
    assert is_retired(ours, stats(at=5 * S, a="x"), buried, [Known(name, ours)])
    assert not is_retired(ours, stats(at=6 * S, a="x"), buried, [Known(name, ours)])
    assert is_retired(ours, stats(at=6 * S, a="x"), buried, [])
    assert not is_retired(ours, stats(at=11 * S, a="x"), buried, [])
    assert not is_retired(manifest("n1"), stats(at=5 * S, a="x"), buried, [])


def test_the_span_of_a_take_begins_with_the_trainers_own_files() -> None:
    whole = replace(manifest("n0", at=5 * S, a="x"), ended=9 * S)
    files = [replace(whole.files[0], mtime=at * S) for at in (1, 6, 8)]
    assert span(files, whole) == (6 * S, 8 * S)
    assert span(files[:1], whole) == (S, S)
