"""What is sent, and what the store has already."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.digest import digest
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.manifest_groups import StoredManifest, doubtful_until
from ckptsync.records.save_decisions import Tombstone
from ckptsync.records.upload_decision import (
    Reading,
    decide,
    find_holder,
    find_stored,
    has_other_part,
    is_retired,
    list_unsent,
    part_of,
)
from ckptsync.stores.opening import create_store
from ckptsync.tensors import Demands
from ckptsync.walk import Stat
from ckptsync.worker.file_selection import EVERYTHING, Preset, Selection, select
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.head_in_process import consolidate_due
from tests.support.vector import vector
from tests.support.worker_in_process import T, tick

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
    assert [(u.entry.path, u.plain) for u in list_unsent(ours, [])] == [
        ("b", "free"),
        ("c", "free"),
        ("a", "free"),
    ]
    assert [u.entry.path for u in list_unsent(ours, [manifest("n0", b="x")])] == ["c", "a"]


def test_what_others_say_of_a_plain_name_is_that_it_has_these_bytes_or_others() -> None:
    (same,) = list_unsent(manifest("n1", a="x"), [manifest("n0", a="x")])
    (other,) = list_unsent(manifest("n0", a="y"), [manifest("n1", a="x"), manifest("n2", a="x")])
    assert (same.plain, other.plain) == ("same", "other")
    beside = manifest("n1", a="x")
    beside = replace(
        beside, files=(replace(beside.files[0], stored_as="run/.ckptsync/c-1/files/n1/a"),)
    )
    (free,) = list_unsent(manifest("n0", a="y"), [beside])
    assert free.plain == "free"


def test_files_are_stored_if_one_location_has_them_all_from_whatever_nodes() -> None:
    told = [
        manifest("n0", a="x"),
        manifest("n0", 1, b="y"),
        manifest("n1", c="z"),
        manifest("n0", location="c-1~2", d="z"),
    ]
    assert find_stored([entry("a", "x"), entry("b", "y")], "n0", told) == told[1]
    assert find_stored([entry("a", "x"), entry("c", "z")], "n1", told) == told[2]
    assert find_stored([entry("a", "x"), entry("d", "z")], "n0", told) is None
    assert find_stored([entry("a", "y")], "n0", told) is None
    assert find_stored([], "n0", told) is None


def test_what_a_pull_gives_is_stored_and_another_nodes_content_of_a_path_still_has_to_be_said() -> (
    None
):
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
        assert (find_stored([*pulled, entry("own", own)], node, told) is not None) is is_stored, (
            node,
            own,
        )


def test_of_another_node_a_time_without_a_fraction_may_be_chance() -> None:
    whole, exact = (
        [manifest("n0", a="x"), manifest("n1", b="y")],
        [manifest("n0", at=7, a="x"), manifest("n1", at=7, b="y")],
    )
    assert find_holder(stats(a="x"), "n0", whole) == whole[0]
    assert find_holder(stats(a="x", b="y"), "n0", whole) is None
    assert find_holder(stats(7, a="x", b="y"), "n0", exact) == exact[0]
    assert find_holder(stats(7, a="x", b="y"), "n2", exact) == exact[1]
    assert find_holder(stats(1, a="x"), "n0", exact) is None
    read = {("a", 1, 1): digest(b"x"), ("b", 1, 1): digest(b"y")}
    assert find_holder(stats(1, a="x", b="y"), "n2", exact, read) == exact[1]
    assert find_holder(stats(1, a="x", b="y"), "n2", exact[:1], read) is None
    copied = {"rng_state_0.pth": "x", "rng_state_1.pth": "y"}
    own = manifest("n0", 0, "c-1", 7, **{"rng_state_0.pth": "x"})
    other = manifest("n1", 0, "c-1~other", 7, **{"rng_state_1.pth": "y"})
    assert find_holder(stats(7, **copied), "n0", [own, other]) == own
    assert find_holder(stats(7, **copied), "n0", [own]) is None


def test_a_later_manifest_has_the_ranks_of_its_own_files() -> None:
    whole = replace(manifest("n0", at=5, rng_state_0="x", c="y"), ranks=(0, 1))
    files = [entry("rng_state_1.pth", "x", 5), entry("c", "y", 5)]
    found = part_of(replace(whole, files=tuple(files), started=5, ended=5), files[1:])
    assert (found.files, found.ranks) == ((files[1],), ())
    assert part_of(replace(whole, files=tuple(files)), files[:1]).ranks == (1,)


def test_a_mate_is_of_the_same_time_on_the_stores_clock() -> None:
    mate = manifest("n1", at=100 * S, a="x")
    assert has_other_part(stats(at=100 * S, b="y"), "n0", 0, [mate])
    assert has_other_part(stats(at=130 * S, b="y"), "n0", 30 * S, [mate])
    assert has_other_part(stats(at=101 * S, b="y"), "n0", 0, [mate])
    assert not has_other_part(stats(at=130 * S, b="y"), "n0", 0, [mate])
    assert not has_other_part(stats(at=70 * S, b="y"), "n0", 0, [mate])
    assert not has_other_part(stats(at=100 * S, b="y"), "n1", 0, [mate])
    assert not has_other_part((), "n0", 0, [mate])


def test_given_up_is_what_a_tombstone_names_or_what_is_older_than_one_whose_manifest_is_gone() -> (
    None
):
    ours, name = (
        manifest("n0", at=5 * S, a="x"),
        "run/.ckptsync/c-1/manifest-n0-0-0123456789abcdef.json",
    )
    buried = {"t": (Tombstone("run", "c-1", "c-1", 0, (name,), ""), 10.0)}
    assert is_retired("n0", stats(at=5 * S, a="x"), buried, [StoredManifest(name, ours)])
    assert not is_retired("n0", stats(at=6 * S, a="x"), buried, [StoredManifest(name, ours)])
    more = stats(at=5 * S, a="x", b="y")
    assert is_retired("n0", more, buried, [StoredManifest(name, ours)])
    assert not is_retired("n1", more, buried, [StoredManifest(name, ours)])
    assert is_retired("n0", stats(at=6 * S, a="x"), buried, [])
    assert not is_retired("n0", stats(at=11 * S, a="x"), buried, [])
    assert not is_retired("n1", stats(at=5 * S, a="x"), buried, [])


def test_a_node_gave_up_what_it_had_written_until_its_end_in_the_tombstone() -> None:
    name = "run/.ckptsync/c-1/manifest-n0-0-0123456789abcdef.json"
    tombstone = Tombstone("run", "c-1", "c-1", 0, (name,), "", ended={"n0": 6 * S})
    assert is_retired("n0", stats(at=6 * S, a="x"), {"t": (tombstone, 10.0)}, [])
    assert not is_retired("n0", stats(at=6 * S + 1, a="x"), {"t": (tombstone, 10.0)}, [])


def test_the_span_of_a_take_begins_with_the_trainers_own_files() -> None:
    whole = replace(manifest("n0", at=5 * S, a="x"), ended=9 * S)
    files = [replace(whole.files[0], mtime=at * S) for at in (1, 6, 8)]
    assert [(p.started, p.ended) for p in (part_of(whole, files), part_of(whole, files[:1]))] == [
        (6 * S, 8 * S),
        (5 * S, 9 * S),
    ]


DDP = (
    "config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state_0.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
)
FSDP = (
    "optimizer_0/.metadata",
    "optimizer_0/__0_0.distcp",
    "pytorch_model_fsdp_0/.metadata",
    "pytorch_model_fsdp_0/__0_0.distcp",
)
ZERO = (
    "global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "latest",
)
WHOLE = Demands({"model.safetensors": None})


def test_everything_is_everything() -> None:
    assert select(DDP + FSDP + ZERO, EVERYTHING, WHOLE) == {*DDP, *FSDP, *ZERO}
    run = RunDir("run", Path("out"))
    assert WorkerOptions("n0", run).selection == EVERYTHING
    assert WorkerOptions("n0", run, send="weights", exclude=("x",)).selection == Selection(
        "weights", (), ("x",)
    )


@pytest.mark.parametrize(
    ("preset", "left_out"),
    [
        ("no-optimizer", {"optimizer.pt"}),
        ("weights", {"optimizer.pt", "rng_state_0.pth", "scheduler.pt", "training_args.bin"}),
    ],
)
def test_a_preset_leaves_out_what_the_model_does_not_need(
    preset: Preset, left_out: set[str]
) -> None:
    assert select(DDP, Selection(preset), WHOLE) == {*DDP} - left_out


@pytest.mark.parametrize("preset", ["no-optimizer", "weights"])
def test_optimizer_states_that_the_model_is_made_of_are_weights(preset: Preset) -> None:
    assert select(ZERO, Selection(preset), Demands(dict.fromkeys(ZERO[:2]))) == {*ZERO}
    assert select(ZERO, Selection(preset), WHOLE) == (
        {ZERO[0], "latest"} if preset == "no-optimizer" else {"latest"}
    )


def test_a_node_that_cannot_tell_sends_what_may_be_weights() -> None:
    shards = ("pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/__1_0.distcp", "rng_state_1.pth")
    assert select(shards, Selection("weights"), Demands()) == {"pytorch_model_fsdp_0/__1_0.distcp"}


def test_globs_choose_among_that_but_never_leave_out_what_describes_the_rest() -> None:
    assert select(DDP, Selection(include=("*.safetensors",)), WHOLE) == {
        "config.json",
        "model.safetensors",
        "trainer_state.json",
    }
    left = select(FSDP, Selection(exclude=("optimizer_0/*", "*.metadata")), Demands())
    assert left == {*FSDP} - {"optimizer_0/__0_0.distcp"}
    assert "rng_state_0.pth" not in select(DDP, Selection(exclude=("rng_state*",)), WHOLE)


@pytest.mark.parametrize("name", ["hf-fsdp2-2node", "hf-zero3-2node"])
def test_a_model_is_made_of_the_weights_of_two_nodes_alone(tmp_path: Path, name: str) -> None:
    store = create_store(str(tmp_path / "store"))
    for n, source in enumerate(vector(name).sources):
        shutil.copytree(source, tmp_path / f"n{n}" / "checkpoint-4", copy_function=shutil.copyfile)
        for path in (tmp_path / f"n{n}").rglob("*.*"):
            os.utime(path, ns=(T, T))  # however slow this machine copies
        worker = Worker(
            WorkerOptions(f"n{n}", RunDir("run", tmp_path / f"n{n}"), 0.0, 0.0, send="weights"),
            store,
        )
        assert [p.phase for p in (*tick(worker, 0.0).progress, *tick(worker, 1.0).progress)] == [
            "sent",
            "stored",
        ]
    assert not list((tmp_path / "store" / "run" / "checkpoint-4").glob("rng_state_*"))
    assert consolidate_due(store, HeadOptions()).failed == ()
    (location,) = read_state(store).locations
    assert location.status == "CONSOLIDATED"
    assert {p for p in location.demands.resume if p.startswith("rng_state_")} == {
        f"rng_state_{n}.pth" for n in range(4)
    }  # and that is told


def reading(*manifests: Manifest, is_contended: bool = False, at: int = 0) -> Reading:
    known = (StoredManifest(f"run/.ckptsync/{m.location}/{m.node}-{m.n}", m) for m in manifests)
    return Reading(tuple(known), is_contended, at)


def test_a_save_that_the_store_does_not_know_is_sent_whole_under_the_plain_name() -> None:
    draft = replace(manifest("n0", a="xx", b="x"), location="")
    decision = decide(draft, reading())
    assert (decision.part.location, decision.recorded, decision.is_early) == ("c-1", None, False)
    assert [u.entry.path for u in decision.unsent] == ["b", "a"]


def test_a_save_that_a_manifest_names_with_its_digests_is_recorded() -> None:
    stored = manifest("n0", a="xx", b="x")
    decision = decide(replace(stored, location=""), reading(stored))
    assert decision.recorded == stored
    assert decision.unsent == ()


def test_of_a_save_that_grew_what_is_missing_is_sent_to_the_same_location() -> None:
    draft = replace(manifest("n0", a="xx", b="x"), location="")
    decision = decide(draft, reading(manifest("n0", b="x")))
    assert (decision.part.location, decision.recorded) == ("c-1", None)
    assert [u.entry.path for u in decision.unsent] == ["a"]


def test_another_save_of_the_name_gets_a_location_of_its_own() -> None:
    draft = replace(manifest("n0", at=9000 * S, a="other"), location="", save="b" * 16)
    stored = replace(manifest("n0", a="first"), save="a" * 16)
    decision = decide(draft, reading(stored))
    assert decision.part.location == "c-1~bbbbbbbb"
    assert [(u.entry.path, u.plain) for u in decision.unsent] == [("a", "free")]


def test_the_same_bytes_in_a_torn_save_before_are_not_a_part_of_the_save_that_a_hook_marked() -> (
    None
):
    before = manifest("n1", at=S, rng="one")
    theirs = replace(manifest("n0", location="c-1~a", at=90 * S, a="new"), save="a" * 16)
    draft = replace(manifest("n1", at=90 * S, rng="one"), location="", save="a" * 16)
    decision = decide(draft, reading(before, theirs))
    assert (decision.part.location, decision.recorded) == ("c-1~a", None)
    # the mark came after the upload
    assert decide(replace(before, location="", save="b" * 16), reading(before)).recorded == before


def test_files_of_ranks_that_another_node_wrote_are_not_this_nodes_part() -> None:
    shards = {"rng_state_0.pth": "zero", "rng_state_1.pth": "one"}
    for at, own in ((S + 1, [*shards][:1]), (S, [*shards])):  # whole seconds may be chance
        files = tuple(entry(path, text, at) for path, text in shards.items())
        theirs = replace(manifest("n1", at=at), files=files[1:])
        draft = replace(manifest("n0", at=at), location="", files=files)
        assert [f.path for f in decide(draft, reading(theirs)).part.files] == own


def rank_of(node: str, rank: int) -> Manifest:
    demands = Demands({}, {}, world=2)
    at = rank * 60 * S + 1
    files = (entry(f"rng_state_{rank}.pth", node, at),)
    return replace(manifest(node, at=at), files=files, ranks=(rank,), demands=demands)


def test_what_only_ranks_and_times_tie_to_a_save_waits_for_proof_and_for_who_sends() -> None:
    draft, theirs = replace(rank_of("n0", 0), location=""), rank_of("n1", 1)
    until = doubtful_until(draft, reading(theirs).manifests)
    assert until > 0
    assert decide(draft, reading(theirs, at=until - 1)).is_early
    assert not decide(draft, reading(theirs, at=until)).is_early
    ahead = replace(draft, clock_offset=5 * S)  # its own clock says when it reads
    assert decide(ahead, reading(theirs, at=until + 5 * S - 1)).is_early
    assert not decide(ahead, reading(theirs, at=until + 5 * S)).is_early
    assert decide(draft, reading(theirs, at=until, is_contended=True)).is_early
    assert not decide(draft, reading(is_contended=True)).is_early


def test_a_decision_is_the_same_while_the_files_to_send_and_their_location_are() -> None:
    draft = replace(manifest("n0", a="xx", b="x"), location="")
    first = decide(draft, reading())
    assert decide(draft, reading(is_contended=True, at=5)).is_same(first)
    assert not decide(draft, reading(manifest("n0", b="x"))).is_same(first)
    another = replace(manifest("n1", a="yy"), save="a" * 16)
    mine = replace(draft, save="b" * 16)
    assert not decide(mine, reading(another)).is_same(decide(mine, reading()))
