"""Which manifests are one save, and where they belong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.digest import digest
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.manifest_groups import (
    NEAR_NS,
    QUIET,
    Sibling,
    StoredManifest,
    better_location,
    choose_location,
    collect_manifests,
    contested_names,
    doubtful_until,
    explain_conflict,
    find_siblings,
    group_by_save,
    live_manifests,
    locate_files,
    moved_manifest,
    reasons_against,
)
from ckptsync.records.same_save import SLACK, Sameness, compare, demands_differ, parts
from ckptsync.records.save_decisions import Join
from ckptsync.records.store_paths import node_file_name
from ckptsync.tensors import Demands

S = 1_000_000_000
FIRST, LATER = 1_000 * S, 9_000 * S


def same_save(a: Manifest, b: Manifest) -> Sameness:
    first, second = parts([a, b])
    return compare(first, second)


def entry(path: str, content: str = "", at: int = FIRST) -> FileEntry:
    return FileEntry(path, len(content), digest(f"{path} {content}".encode()), 1, (), at)


def shard(rank: int, save: str = "first", at: int = FIRST) -> FileEntry:
    return entry(f"dcp/__{rank}_0.distcp", save, at)


def manifest(
    node: str,
    *files: FileEntry,
    location: str = "checkpoint-5",
    ranks: tuple[int, ...] = (),
    save: str = "",
) -> Manifest:
    times = [f.mtime for f in files] or [FIRST]
    where, span = ("run", "checkpoint-5", location), (min(times), max(times))
    return Manifest(*where, node, 0, files, ranks, *span, Demands(), save=save)


def of_rank(
    rank: int, node: str, save: str = "first", at: int = FIRST, location: str = "checkpoint-5"
) -> Manifest:
    return manifest(node, shard(rank, save, at), location=location, ranks=(rank,))


def known(*manifests: Manifest) -> tuple[StoredManifest, ...]:
    return tuple(StoredManifest(f"{i}-{m.node}-{m.location}", m) for i, m in enumerate(manifests))


def test_a_file_that_comes_later_joins_its_own_node_whatever_the_time() -> None:
    stored = of_rank(0, "a", location="checkpoint-5~1")
    take = manifest("a", *stored.files, entry("README.md", at=LATER), ranks=(0,))
    assert choose_location(take, known(stored)) == "checkpoint-5~1"


def test_a_save_id_names_the_location_and_decides_against_time() -> None:
    first = replace(of_rank(0, "a"), save="abcdefgh-1")
    assert (
        choose_location(replace(of_rank(1, "b"), save="0123456789"), known(first))
        == "checkpoint-5~01234567"
    )
    assert (
        choose_location(replace(of_rank(1, "b", at=LATER), save="abcdefgh-1"), known(first))
        == "checkpoint-5"
    )


def test_an_id_that_is_no_name_is_hashed_into_one() -> None:
    location = choose_location(
        replace(of_rank(1, "b"), save="../../etc"), known(replace(of_rank(0, "a"), save="x"))
    )
    assert location.startswith("checkpoint-5~")
    assert "." not in location
    assert "/" not in location


def test_a_file_edited_the_day_after_disturbs_neither_save_nor_mate() -> None:
    config = entry("config.json", "old")
    a, b = manifest("a", shard(0), config, ranks=(0,)), of_rank(1, "b")
    edited = manifest("a", shard(0), entry("config.json", "new", LATER), ranks=(0,))
    edited = replace(edited, location=choose_location(edited, known(a, b)))
    assert edited.location != "checkpoint-5"
    assert explain_conflict("checkpoint-5", known(a, b, edited)) == ""


def test_two_jobs_at_one_moment_are_in_doubt_as_soon_as_it_shows() -> None:
    a0, b1 = of_rank(0, "a", "job one"), of_rank(1, "b", "job two")
    assert explain_conflict("checkpoint-5", known(a0, b1)) == ""  # nothing could tell yet
    c1 = of_rank(1, "c", "job one", location="checkpoint-5~1")
    assert "rank 1" in explain_conflict("checkpoint-5", known(a0, b1, c1))


def test_a_take_that_fits_two_saves_gets_a_location_of_its_own() -> None:
    a0, c0 = of_rank(0, "a"), of_rank(0, "c", "second", location="checkpoint-5~1")
    location = choose_location(of_rank(1, "b"), known(a0, c0))
    assert location not in ("checkpoint-5", "checkpoint-5~1")


def test_a_location_of_two_moments_is_in_doubt_and_says_how_far_apart_they_are() -> None:
    doubt = explain_conflict("checkpoint-5", known(of_rank(0, "a"), of_rank(1, "b", at=LATER)))
    assert (
        doubt == "a and b may be two saves: their files were written 8000.0 s apart, and no save id"
        " from the hook links them"
    )


def test_of_two_that_raced_for_a_name_the_one_that_began_first_keeps_it() -> None:
    raced = known(of_rank(0, "b"), of_rank(0, "a", "second", LATER))
    assert better_location("b", "checkpoint-5", raced) == "checkpoint-5"
    assert better_location("a", "checkpoint-5", raced).startswith("checkpoint-5~")


def test_nobody_moves_for_want_of_proof() -> None:
    jobs = [of_rank(0, "a"), of_rank(1, "b"), of_rank(1, "c", "second")]
    assert [better_location(node, "checkpoint-5", known(*jobs)) for node in "abc"] == [
        "checkpoint-5"
    ] * 3


def test_a_save_leaves_a_location_to_those_that_cannot_tell_where_else_to_go() -> None:
    jobs = [of_rank(0, "a", at=LATER), of_rank(1, "b", at=LATER), of_rank(1, "c", "second", LATER)]
    assert better_location("d", "checkpoint-5", known(*jobs, of_rank(3, "d"))) != "checkpoint-5"


def test_of_two_locations_of_one_save_the_smaller_name_wins() -> None:
    apart = known(
        of_rank(0, "a", location="checkpoint-5~2"), of_rank(1, "b", location="checkpoint-5~1")
    )
    assert better_location("a", "checkpoint-5~2", apart) == "checkpoint-5~1"
    assert better_location("b", "checkpoint-5~1", apart) == "checkpoint-5~1"


def test_a_node_cannot_take_back_what_another_said() -> None:
    a, b = known(of_rank(0, "a"), of_rank(1, "b"))
    liar = StoredManifest("x", replace(of_rank(2, "c"), supersedes=(a.name, b.name)))
    assert live_manifests([a, b, liar]) == (a, b, liar)


def test_moving_joins_all_that_a_node_said() -> None:
    zero, one = (
        of_rank(0, "a"),
        replace(manifest("a", entry("rng_state_1.pth", at=LATER), ranks=(1,)), n=1),
    )
    at_home = moved_manifest(known(zero, one), "checkpoint-5~1", 0)
    assert ([f.path for f in at_home.files], at_home.ranks) == (
        ["dcp/__0_0.distcp", "rng_state_1.pth"],
        (0, 1),
    )
    assert (at_home.started, at_home.ended) == (FIRST, LATER)


def test_one_content_lies_once_under_its_plain_name() -> None:
    located = locate_files(
        [manifest("b", entry("config.json", "x")), manifest("a", entry("config.json", "x"))]
    )
    assert [(at.name, at.nodes) for at in located["config.json"]] == [
        ("run/checkpoint-5/config.json", ("a", "b"))
    ]


def beside(m: Manifest) -> Manifest:
    return replace(
        m,
        files=tuple(
            replace(f, stored_as=node_file_name(m.run, m.location, m.node, f.path)) for f in m.files
        ),
    )


def test_a_file_lies_where_its_manifest_says_and_the_plain_name_comes_first() -> None:
    others = [manifest("b", entry("state", "b")), manifest("c", entry("state", "b"))]
    located = locate_files([beside(manifest("a", entry("state", "a"))), *others])
    assert [(at.name, at.nodes) for at in located["state"]] == [
        ("run/checkpoint-5/state", ("b", "c")),
        ("run/.ckptsync/checkpoint-5/files/a/state", ("a",)),
    ]
    assert contested_names(others) == frozenset()


def test_of_two_contents_under_one_name_that_of_the_smallest_node_counts() -> None:
    both = [manifest("b", entry("state", "b")), manifest("a", entry("state", "a"))]
    assert [(at.entry.digest, at.nodes) for at in locate_files(both)["state"]] == [
        (both[1].files[0].digest, ("a",))
    ]
    assert contested_names(both) == {"run/checkpoint-5/state"}


SOON = FIRST + 52 * S
WHOLE = Demands({"dcp/__0_0.distcp": None, "dcp/__1_0.distcp": None}, {}, 2)


def part(rank: int, node: str, at: int = FIRST, **more: object) -> Manifest:
    """One of two parts of a save; that of rank 0 has the metadata."""
    told: dict[str, object] = {"demands": WHOLE if rank == 0 else Demands(), **more}
    return replace(of_rank(rank, node, at=at), **told)  # type: ignore[arg-type]


def test_two_parts_that_complete_each_other_within_minutes_are_one_save() -> None:
    assert choose_location(part(1, "b", SOON), known(part(0, "a"))) == "checkpoint-5"
    assert choose_location(part(0, "a"), known(part(1, "b", FIRST + NEAR_NS))) == "checkpoint-5"
    assert explain_conflict("checkpoint-5", known(part(0, "a"), part(1, "b", SOON))) == ""


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (part(0, "a"), part(1, "b", FIRST + NEAR_NS + 1), "their files were written 300 s apart"),
        (part(0, "a"), part(0, "b", SOON), "rank 0"),
        (part(0, "a"), part(1, "a", SOON), "a uploaded both"),
        (part(0, "a", save="one"), part(1, "b", SOON, save="two"), "two save ids"),
        (part(0, "a", save="one"), part(1, "b", SOON), "only one of a and b has a save id"),
        (part(0, "a"), manifest("b", entry("x", at=SOON)), "no file of b says which rank wrote it"),
        (
            part(0, "a", demands=replace(WHOLE, world=3)),
            part(1, "b", SOON),
            "no part has files of rank 2",
        ),
        (part(0, "a", demands=replace(WHOLE, world=None)), part(1, "b", SOON), "how many ranks"),
        (
            part(0, "a", demands=replace(WHOLE, model={"gone": None})),
            part(1, "b", SOON),
            "gone: no part has it",
        ),
        (
            part(0, "a", demands=replace(WHOLE, model={"dcp/__1_0.distcp": 9})),
            part(1, "b", SOON),
            "9 expected",
        ),
        (
            manifest("a", shard(0), entry("state", "one"), ranks=(0,)),
            manifest("b", shard(1, at=SOON), entry("state", "two", SOON), ranks=(1,)),
            "two contents of state",
        ),
    ],
)
def test_evidence_of_two_saves_keeps_parts_apart(
    first: Manifest, second: Manifest, reason: str
) -> None:
    found = group_by_save(known(first, replace(second, location="checkpoint-5~1")))
    assert len(found) == 2
    assert any(reason in line for line in reasons_against(found)), reasons_against(found)
    assert choose_location(second, known(first)) != "checkpoint-5"


def test_another_candidate_keeps_all_apart() -> None:
    """Rank 0 wrote the name twice: the part of rank 1 is of the second save, or of the first, whose
    own part never came.
    """
    again = part(
        0,
        "a",
        FIRST + 90 * S,
        files=(shard(0, "second", FIRST + 90 * S),),
        location="checkpoint-5~1",
    )
    found = known(part(0, "a"), again, part(1, "b", SOON, location="checkpoint-5~2"))
    assert len(group_by_save(found)) == 3
    assert [s.location for s in find_siblings("checkpoint-5~2", found)] == [
        "checkpoint-5",
        "checkpoint-5~1",
    ]


def test_proof_is_stronger_than_what_completes() -> None:
    mate = part(0, "a", SOON, files=(shard(0, "second", SOON),), location="checkpoint-5~1")
    later = part(1, "b", SOON, location="checkpoint-5~1")
    found = group_by_save(known(part(0, "a"), mate, later))
    assert sorted(len(g.parts) for g in found) == [1, 2]
    assert (
        better_location("b", "checkpoint-5~1", known(part(0, "a"), mate, later)) == "checkpoint-5~1"
    )


def test_only_what_ranks_and_time_alone_tie_is_doubtful_for_a_while() -> None:
    assert doubtful_until(part(1, "b", SOON), known(part(0, "a"))) == SOON + QUIET
    assert doubtful_until(part(1, "b"), known(part(0, "a"))) == 0
    assert doubtful_until(part(1, "b", LATER), known(part(0, "a"))) == 0


def joined(*manifests: Manifest) -> dict[str, object]:
    """Manifests, and a record that joins them all."""
    names = {
        f"run/.ckptsync/{m.location}/manifest-{m.node}-0-{i:016x}.json": m
        for i, m in enumerate(manifests)
    }
    return {**names, "j": Join("run", "checkpoint-5", "checkpoint-5", 0, tuple(names))}


def test_what_a_person_joins_is_one_save_and_stays_it_when_it_moves() -> None:
    records = joined(of_rank(0, "a"), of_rank(1, "b", at=LATER, location="checkpoint-5~1"))
    found = collect_manifests(records)
    assert better_location("b", "checkpoint-5~1", found) == "checkpoint-5"
    assert list(find_siblings("checkpoint-5", found)) == [Sibling("checkpoint-5~1", ("b",))]
    old = [k for k in found if k.manifest.node == "b"]
    found = collect_manifests({**records, "new": moved_manifest(old, "checkpoint-5", 0)})
    assert explain_conflict("checkpoint-5", found) == ""
    assert find_siblings("checkpoint-5", found) == {}
    (moved,) = [k for k in found if k.name == "new"]
    again = replace(moved.manifest, n=1, supersedes=("new",))
    found = collect_manifests({**records, "new": moved.manifest, "again": again})
    assert explain_conflict("checkpoint-5", found) == ""
    liar = replace(again, node="z")
    found = collect_manifests({**records, "new": moved.manifest, "liar": liar})
    (lie,) = [k for k in found if k.name == "liar"]
    assert not lie.joins, "a node joins nothing by what it says of others"


def test_a_join_does_not_outweigh_a_contradiction() -> None:
    found = collect_manifests(
        joined(of_rank(0, "a"), of_rank(0, "b", "second", LATER, location="checkpoint-5~1"))
    )
    assert len(group_by_save(live_manifests(found))) == 2


A0, B1 = of_rank(0, "a"), of_rank(1, "b")
ALONE = {"model.safetensors": 7}


def whole(node: str, content: str) -> Manifest:
    return replace(
        manifest(node, entry("model.safetensors", content)), demands=Demands(dict(ALONE))
    )


@pytest.mark.parametrize(
    ("a", "b", "relation"),
    [
        (A0, B1, "one"),
        (A0, replace(B1, started=B1.started + SLACK, ended=B1.ended + SLACK), "one"),
        (A0, replace(B1, started=B1.started + SLACK + 1, ended=B1.ended + SLACK + 1), "unproven"),
        (A0, of_rank(0, "b", "second"), "two"),
        (A0, of_rank(0, "b"), "one"),  # one file, seen by two nodes: the same bytes
        (A0, manifest("b", entry("rng_state_0.pth"), ranks=(0,)), "two"),
        (A0, of_rank(0, "a", "second"), "two"),
        (A0, of_rank(0, "a", "second", LATER), "two"),
        (A0, manifest("a", shard(0), entry("late", at=LATER)), "one"),
        (
            replace(A0, location="x"),
            replace(manifest("a", entry("late", at=LATER)), location="x"),
            "one",
        ),
        (
            replace(A0, location=""),
            replace(manifest("a", entry("late", at=LATER)), location=""),
            "unproven",
        ),
        (replace(A0, save="s"), replace(of_rank(1, "b", at=LATER), save="s"), "one"),
        (replace(A0, save="s"), replace(B1, save="t"), "two"),
        (replace(A0, save="s"), B1, "one"),
        (replace(A0, save="s"), replace(of_rank(0, "a", "second"), save="s"), "two"),
        (replace(A0, demands=Demands(world=2)), replace(B1, demands=Demands(world=4)), "two"),
        (replace(A0, demands=Demands(world=2)), replace(B1, demands=Demands(world=2)), "one"),
        (whole("a", "one"), whole("b", "one"), "one"),
        (whole("a", "one"), whole("b", "two"), "two"),
        (
            manifest("a", entry("optimizer.pt", "x")),
            manifest("b", entry("optimizer.pt", "y")),
            "one",
        ),
        (A0, replace(of_rank(1, "b", at=LATER), clock_offset=LATER - FIRST), "one"),
    ],
)
def test_what_two_manifests_prove(a: Manifest, b: Manifest, relation: str) -> None:
    assert same_save(a, b).relation == relation
    assert same_save(b, a) == same_save(a, b)


def test_a_contradiction_says_what_it_is() -> None:
    assert same_save(A0, of_rank(0, "a", "second")).reason == "dcp/__0_0.distcp has two contents"
    assert (
        demands_differ(Demands({"x": 1}), Demands(resume={"x": 2})) == "x should have 1 and 2 bytes"
    )
    assert demands_differ(Demands({"x": 1}), Demands(resume={"x": None})) == ""


@given(st.integers(0, 10), st.integers(0, 10), st.integers(0, 10), st.integers(0, 10))
def test_spans_touch_if_they_have_a_moment_in_common_or_nearly(
    a: int, b: int, c: int, d: int
) -> None:
    first = replace(A0, started=min(a, b) * SLACK, ended=max(a, b) * SLACK)
    second = replace(B1, started=min(c, d) * SLACK, ended=max(c, d) * SLACK)
    near = any(
        abs(x - y) <= 1
        for x in range(min(a, b), max(a, b) + 1)
        for y in range(min(c, d), max(c, d) + 1)
    )
    assert (same_save(first, second).relation == "one") == near


def test_an_edited_files_time_does_not_reach_back_to_the_first_save() -> None:
    new = (entry("config.json", "new", LATER), entry("late", at=LATER + S))
    edited = replace(manifest("a", *A0.files, *new), clock_offset=7)
    first = manifest("a", *A0.files, entry("config.json", "old", FIRST + SLACK))
    before, mine, mate = parts([first, edited, B1])
    assert (before.start, before.end) == (FIRST, FIRST + SLACK)
    assert (mine.start, mine.end) == (LATER - 7, LATER + S - 7)
    assert compare(mine, mate).relation == "unproven"
    # without the first, nothing says that the shard is older
    assert same_save(edited, B1).relation == "one"


def test_an_id_repeated_over_changed_bytes_proves_nothing() -> None:
    first, mate = replace(A0, save="s"), replace(B1, save="s")
    again = replace(manifest("a", replace(shard(0, "second"), mtime=LATER)), save="s", ended=LATER)
    _, mine, other = parts([first, again, mate])
    assert compare(mine, other).relation != "one"
