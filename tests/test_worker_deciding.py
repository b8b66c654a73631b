"""What to send and where: pure decisions over manifests."""

from __future__ import annotations

from dataclasses import replace

from ckptsync.digest import digest
from ckptsync.model import Demands
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.saves import Known
from ckptsync.records.tombstone import Tombstone
from ckptsync.walk import Stat
from ckptsync.worker.plan import has_mate, holder, is_retired, missing, part, span, stored

S = 10**9


def entry(path: str, content: str, mtime: int = 0) -> FileEntry:
    return FileEntry(path, len(content), digest(content.encode()), 1 << 14, (), mtime)


def manifest(node: str, n: int = 0, location: str = "c-1", at: int = 0, **files: str) -> Manifest:
    entries = tuple(entry(p, c, at) for p, c in files.items())
    return Manifest("run", "c-1", location, node, n, entries, (), at, at, Demands())


def stats(at: int = 0, **files: str) -> tuple[Stat, ...]:
    return tuple(Stat(p, len(c), at, n, 0) for n, (p, c) in enumerate(files.items()))


def test_small_files_go_first_and_what_is_bound_by_us_goes_not_at_all() -> None:
    ours = manifest("n0", a="xxx", b="x", c="xx")
    assert [(u.entry.path, u.lies) for u in missing(ours, [])] == [("b", "nowhere"), ("c", "nowhere"), ("a", "nowhere")]
    assert [u.entry.path for u in missing(ours, [manifest("n0", b="x")])] == ["c", "a"]


def test_what_others_say_of_a_plain_name_is_that_it_has_these_bytes_or_others() -> None:
    (same,) = missing(manifest("n1", a="x"), [manifest("n0", a="x")])
    (other,) = missing(manifest("n0", a="y"), [manifest("n1", a="x"), manifest("n2", a="x")])
    assert (same.lies, other.lies) == ("there", "taken")
    beside = manifest("n1", a="x")
    beside = replace(beside, files=(replace(beside.files[0], stored_as="run/.ckptsync/c-1/files/n1/a"),))
    (free,) = missing(manifest("n0", a="y"), [beside])
    assert free.lies == "nowhere"


def test_files_are_stored_if_one_location_has_them_all_from_whatever_nodes() -> None:
    told = [manifest("n0", a="x"), manifest("n0", 1, b="y"), manifest("n1", c="z"), manifest("n0", location="c-1~2", d="z")]
    assert stored([entry("a", "x"), entry("b", "y")], "n0", told) == told[1]
    assert stored([entry("a", "x"), entry("c", "z")], "n1", told) == told[2]
    assert stored([entry("a", "x"), entry("d", "z")], "n0", told) is None
    assert stored([entry("a", "y")], "n0", told) is None
    assert stored([], "n0", told) is None


def test_what_a_pull_gives_is_stored_and_another_node_s_content_of_a_path_has_still_to_be_said() -> None:
    told = [manifest("n0", a="x", own="0"), manifest("n1", b="y", own="1"), manifest("n2", c="z")]
    pulled = [entry("a", "x"), entry("b", "y"), entry("c", "z")]
    for node, own, is_stored in [
        ("n0", "0", True),
        ("n1", "0", True),  # all of it, pulled for everybody
        ("n1", "1", True),
        ("n3", "1", True),  # pulled for n1, whose location n3 takes
        ("n0", "1", False),
        ("n2", "1", False),
        ("n3", "2", False),
    ]:
        assert (stored([*pulled, entry("own", own)], node, told) is not None) is is_stored, (node, own)


def test_of_another_node_a_time_without_a_fraction_may_be_chance() -> None:
    whole, exact = [manifest("n0", a="x"), manifest("n1", b="y")], [manifest("n0", at=7, a="x"), manifest("n1", at=7, b="y")]
    assert holder(stats(a="x"), "n0", whole) == whole[0]
    assert holder(stats(a="x", b="y"), "n0", whole) is None
    assert holder(stats(7, a="x", b="y"), "n0", exact) == exact[0]
    assert holder(stats(7, a="x", b="y"), "n2", exact) == exact[1]
    assert holder(stats(1, a="x"), "n0", exact) is None
    read = {("a", 1, 1): digest(b"x"), ("b", 1, 1): digest(b"y")}
    assert holder(stats(1, a="x", b="y"), "n2", exact, read) == exact[1]
    assert holder(stats(1, a="x", b="y"), "n2", exact[:1], read) is None


def test_a_later_manifest_has_the_ranks_of_its_own_files() -> None:
    whole = replace(manifest("n0", at=5, rng_state_0="x", c="y"), ranks=(0, 1))
    files = [entry("rng_state_1.pth", "x", 5), entry("c", "y", 5)]
    found = part(replace(whole, files=tuple(files), started=5, ended=5), files[1:])
    assert (found.files, found.ranks) == ((files[1],), ())
    assert part(replace(whole, files=tuple(files)), files[:1]).ranks == (1,)


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
    assert is_retired("n0", stats(at=5 * S, a="x"), buried, [Known(name, ours)])
    assert not is_retired("n0", stats(at=6 * S, a="x"), buried, [Known(name, ours)])
    assert is_retired("n0", stats(at=6 * S, a="x"), buried, [])
    assert not is_retired("n0", stats(at=11 * S, a="x"), buried, [])
    assert not is_retired("n1", stats(at=5 * S, a="x"), buried, [])


def test_the_span_of_a_take_begins_with_the_trainers_own_files() -> None:
    whole = replace(manifest("n0", at=5 * S, a="x"), ended=9 * S)
    files = [replace(whole.files[0], mtime=at * S) for at in (1, 6, 8)]
    assert span(files, whole) == (6 * S, 8 * S)
    assert span(files[:1], whole) == (5 * S, 9 * S), "of what was added alone the save's own"
