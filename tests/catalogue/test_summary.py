from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import (
    DamagedFile,
    Proven,
    Summary,
    cut,
    explain_missing,
    read_ranks,
    show_ranks,
    summarize,
)
from ckptsync.catalogue.uncached import read_state
from ckptsync.checkpoint_dirs import series_and_step
from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.event_record import EventRecord
from ckptsync.records.io import Fault
from ckptsync.records.manifest import Manifest
from ckptsync.records.report import Level, VerifyFinding
from ckptsync.records.save_decisions import Stage, Tombstone
from ckptsync.records.store_paths import parse_record_name
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from tests.support.filled_stores import DEMO, FIRST, SECOND, entry, put, report_on, send, two_nodes
from tests.support.head_in_process import consolidate_due

SHARD = "checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"


def short(store: MemoryStore) -> Summary:
    found = read_state(store)
    return summarize(found.locations[0], found.mtimes)


def test_a_whole_location_in_short() -> None:
    store = MemoryStore()
    two_nodes(store)
    found = short(store)
    assert (found.run, found.location, found.step) == ("run", "checkpoint-4", 4)
    assert (found.status, found.nodes) == ("COMPLETE", ("node0", "node1"))
    own = list(store.names("run/checkpoint-4/"))
    assert (found.files, found.size) == (len(own), sum(e.size for e in own))
    assert (found.model, found.resume, found.consolidated, found.lacks) == (True, True, False, ())
    assert found.ended == found.arrived, "no file is newer than its arrival"
    assert found.ahead == pytest.approx(FIRST / SECOND, abs=100)


def test_times_are_the_stores() -> None:
    store = MemoryStore()  # its clock counts writes
    two_nodes(store)
    first, second = (e.mtime for e in store.names("run/.ckptsync/"))
    assert (short(store).first_arrival, short(store).arrived) == (first, second)
    found = read_state(store).locations[0]
    put(store, report_on(found, 1, "ok", []))
    for stored in found.manifests:
        store.write(stored.name, [read_all(store, stored.name)])
    report, *again = sorted(e.mtime for e in store.names("run/.ckptsync/"))
    assert (short(store).first_arrival, short(store).arrived) == (report, again[-1])


def test_damage_is_told_as_it_was_found_and_whether_the_file_came_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    found = read_state(store).locations[0]
    findings = [VerifyFinding("digest", SHARD, "two blocks"), VerifyFinding("note", "x", "y")]
    put(store, report_on(found, 1, "damaged", findings, "parse"))
    said = short(store)
    assert (said.status, said.evidence, said.proof.damage_level) == (
        "DAMAGED",
        (f"{SHARD}: digest: two blocks",),
        "parse",
    )
    assert said.proof.rewritten_at < said.proof.damaged_at
    assert said.damaged == (DamagedFile(SHARD, "file", ("node1",)),)
    store.write(f"run/{SHARD}", [b"again"])
    assert short(store).proof.rewritten_at > short(store).proof.damaged_at
    assert short(store).evidence == (f"{SHARD}: uploaded again, not yet verified",)
    assert short(store).damaged == (DamagedFile(SHARD, "file", ("node1",), is_rewritten=True),)


def test_a_model_is_made_again_and_a_manifest_written_again_by_its_own_node() -> None:
    store = MemoryStore()
    two_nodes(store)
    found = read_state(store).locations[0]
    record = next(k.name for k in found.manifests if k.manifest.node == "node1")
    names = ("consolidated/checkpoint-4/model.safetensors", record.removeprefix("run/"))
    damage = [VerifyFinding("digest", name, "differs") for name in names]
    put(store, report_on(found, 1, "damaged", damage))
    assert short(store).damaged == (
        DamagedFile(names[0], "model"),
        DamagedFile(names[1], "record", ("node1",)),
    )
    for name in names:
        before = [read_all(store, f"run/{name}")] if name == names[1] else [b"model"]
        store.write(f"run/{name}", before)
    assert short(store).evidence == (
        f"{names[0]}: made again, not yet verified",
        f"{names[1]}: written again, not yet verified",
    )


def test_of_an_unknown_layout_nothing_is_awaited_of_anybody() -> None:
    store = MemoryStore()
    incomplete(store, "a", [0], "checkpoint-1", 2)
    files = (entry("weights.npz", b"x", FIRST),)
    store.write("run/mine/weights.npz", [b"x"])
    put(store, Manifest("run", "mine", "mine", "b", 0, files, (), FIRST, FIRST, Demands({}, {})))
    found = seen(store, "mine")
    assert (found.status, found.unknown) == ("INCOMPLETE", True)
    assert (found.missing_lines, found.awaited_nodes) == ((), ())
    assert "of no layout that ckptsync merges" in found.evidence[0]


def test_what_was_proven_when() -> None:
    store = MemoryStore()
    two_nodes(store)
    seen = read_state(store).locations[0]
    assert short(store).proof == Proven()
    of_none = put(store, replace(report_on(seen, 0, "ok"), manifests=()))
    put(store, replace(report_on(seen, 0, "ok"), model_record="another"))
    stat = put(store, report_on(seen, 0, "ok", level="stat"))
    load = put(store, report_on(seen, 1, "ok", level="load"))
    digest = put(store, report_on(seen, 2, "ok"))
    mtimes = read_state(store).mtimes
    times: dict[Level, float] = {"stat": mtimes[stat], "digest": mtimes[digest]}
    times["load"] = mtimes[load]
    passed = tuple(times.items())
    proof = Proven(
        digest, "ok", "digest", mtimes[digest], holds=True, passed=passed, first=mtimes[load]
    )
    assert short(store).proof == proof
    damage = [VerifyFinding("digest", SHARD, ""), VerifyFinding("digest", "checkpoint-4/gone", "")]
    first = put(store, report_on(seen, 3, "damaged", damage, "parse"))
    last = put(store, report_on(seen, 4, "damaged", damage[:1]))
    mtimes = read_state(store).mtimes
    assert short(store).proof == replace(
        proof,
        report=last,
        verdict="damaged",
        when=mtimes[last],
        holds=False,
        damage=(first, last),
        damage_level="parse",
        damaged_at=mtimes[last],
        rewritten_at=mtimes[f"run/{SHARD}"],
    )
    answers = [put(store, report_on(seen, n, "ok", level="parse")) for n in (5, 6)]
    answered_at, when = (read_state(store).mtimes[name] for name in answers)
    assert short(store).proof == replace(
        proof,
        report=answers[1],
        level="parse",
        when=when,
        passed=(*passed[:2], ("parse", when), passed[2]),
        answered=last,
        answered_at=answered_at,
    )
    names = tuple(k.name for k in seen.manifests)
    put(store, Tombstone("run", "checkpoint-4", "checkpoint-4", 0, names, "old", "shards"))
    assert short(store).proof.first == mtimes[of_none], "of shards that go nothing is to be proven"


def test_marks_that_were_withdrawn_and_set_again_are_told_with_their_times() -> None:
    store = MemoryStore()
    two_nodes(store)
    names = tuple(k.name for k in read_state(store).locations[0].manifests)
    stages: tuple[Stage, ...] = ("marked", "withdrawn", "marked", "withdrawn", "marked", "begun")
    where = ("run", "checkpoint-4", "checkpoint-4")
    stones = [
        put(store, Tombstone(*where, n, names, "old", stage=stage))
        for n, stage in enumerate(stages)
    ]
    times = read_state(store).mtimes
    told = short(store)
    assert (told.mark, told.marked_at) == (stones[4], times[stones[5]])
    assert (told.withdrawn_at, told.tombstones) == (times[stones[3]], 6)


def test_of_what_events_measured_the_last_value_counts() -> None:
    store = MemoryStore()
    two_nodes(store)
    for n in (9, 10):
        where = ("run", "checkpoint-4", "checkpoint-4", n, "eval", "0" * 16, "complete", "")
        failed = EventRecord(*where, outcome="failed", error=f"try {n}", metrics={"acc": float(n)})
        put(store, failed)
    assert short(store).metrics == (("acc", 10.0),)
    assert [(h.failures, h.error) for h in short(store).handled] == [(2, "try 10")]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("checkpoint-500", 500),
        ("final", None),
        ("epoch_1_step_20", 20),
        ("epoch-1-step-20-v1.ckpt", 20),
        ("last.ckpt", None),
        ("checkpoint_2026-01-02_03-04-05.000006", None),
    ],
)
def test_a_step_is_the_number_in_a_name_that_counts_steps(name: str, number: int | None) -> None:
    assert series_and_step(name)[1] == number


def test_of_many_lines_the_others_are_counted() -> None:
    assert cut(["a"] * 8) == ("a",) * 8
    assert cut(["a"] * 11) == (*("a",) * 8, "and 3 more")


def test_what_has_come_since_it_was_consolidated_and_what_its_model_lacks_is_told() -> None:
    store = MemoryStore()
    two_nodes(store)
    assert (short(store).late, short(store).to_open) == (False, ()), "nothing is consolidated"
    consolidate_due(store, HeadOptions())
    assert (short(store).late, short(store).to_open) == (False, ("config.json", "tokenizer"))
    late = read_state(store).locations[0].manifests[1].manifest
    put(store, replace(late, n=1, files=(replace(late.files[0], path="README.md"),)))
    assert short(store).late


@pytest.mark.parametrize(
    ("record", "error", "kind"),
    [
        ("manifest-n0-0", Corrupt("x"), "digest"),
        ("model-0", Corrupt("x"), "digest"),
        ("report-1", Corrupt("x"), "note"),
        ("event-0", Corrupt("x"), "note"),
        ("manifest-n0-0", Unsupported("x"), "note"),
    ],
)
def test_a_record_that_cannot_be_read_is_damage_unless_it_is_only_newer_or_a_report(
    record: str, error: CkptsyncError, kind: str
) -> None:
    name = f"run/.ckptsync/checkpoint-1~ab/{record}-{'0' * 16}.json"
    parsed = parse_record_name(name)
    assert parsed
    fault = Fault(name, parsed, error)
    assert (fault.run, fault.location) == ("run", "checkpoint-1~ab")
    assert (fault.finding.kind, fault.finding.name) == (kind, name.removeprefix("run/"))


# Which node should have the missing files.

LOST = "global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt"


def seen(store: MemoryStore, location: str) -> Summary:
    return next(s for s in read_catalogue(store).summaries if s.location == location)


def incomplete(
    store: MemoryStore,
    node: str,
    ranks: Sequence[int],
    location: str,
    world: int | None = None,
    *,
    whole: bool = True,
) -> None:
    """A node that had these ranks sends a file of each.

    ``whole``: what it sends says which files there are in all.
    """
    paths = [f"__{rank}_0.distcp" for rank in ranks]
    demands = Demands(
        {f"__{rank}_0.distcp": None for rank in range(world or 0)} if whole else {}, {}, world
    )
    for path in paths:
        store.write(f"run/{location}/{path}", [b"x"])
    files = tuple(entry(path, b"x", FIRST) for path in sorted(paths))
    where, span = ("run", location, location), (FIRST, FIRST)
    put(store, Manifest(*where, node, 0, files, tuple(ranks), *span, demands, save=location))


def test_what_a_dead_node_had_is_named_with_the_node_that_had_its_ranks_before() -> None:
    store = MemoryStore()
    two_nodes(store, "zero3", "checkpoint-3")
    send(store, DEMO / "zero3/node0/checkpoint-4", "node0", "checkpoint-4")
    found = seen(store, "checkpoint-4")
    assert found.status == "INCOMPLETE"
    assert found.missing_lines == (
        f"node1, which had rank 1 in checkpoint-3: {LOST} and 2 more, which no node has uploaded",
    )
    assert found.awaited_nodes == ("node1",)


def test_without_another_checkpoint_the_rank_is_named_and_nobody_blamed() -> None:
    store = MemoryStore()
    send(store, DEMO / "zero3/node0/checkpoint-4", "node0", "checkpoint-4")
    found = seen(store, "checkpoint-4")
    assert (found.missing_lines, found.awaited_nodes) == (
        (f"rank 1: {LOST} and 2 more, which no node has uploaded",),
        (),
    )


def test_the_checkpoint_nearest_in_time_tells_whose_ranks_they_are() -> None:
    store = MemoryStore()
    incomplete(store, "old", [0, 1, 2, 3], "checkpoint-8", 4)  # it came first, whatever its name
    for location in ("checkpoint-2", "checkpoint-3"):
        incomplete(store, "a", [2, 3], location, 4)
        if location == "checkpoint-2":
            incomplete(store, "b", [0, 1], location, 4)
    found = seen(store, "checkpoint-3")
    assert found.missing_lines == (
        (
            "b, which had ranks 0-1 in checkpoint-2: __0_0.distcp and 1 more, which no node has"
            " uploaded"
        ),
    )


def test_a_hooks_world_tells_of_ranks_of_which_nothing_came() -> None:
    store = MemoryStore()
    incomplete(store, "a", [0, 1], "checkpoint-1", 4, whole=False)
    assert seen(store, "checkpoint-1").missing_lines == (
        "ranks 2-3: no node has uploaded any of its files",
    )


def test_where_no_metadata_came_those_who_took_part_before_are_awaited() -> None:
    store = MemoryStore()
    incomplete(store, "a", [0], "checkpoint-1", 2)
    incomplete(store, "b", [1], "checkpoint-1", 2)
    incomplete(store, "b", [1], "checkpoint-2", whole=False)
    found = seen(store, "checkpoint-2")
    assert (found.missing_lines, found.awaited_nodes) == (
        ("a: has uploaded no part of it yet, as it did of checkpoint-1",),
        ("a",),
    )


def test_what_was_sent_and_is_not_in_the_store_is_asked_of_its_node() -> None:
    store = MemoryStore()
    two_nodes(store, "zero3", "checkpoint-4")
    store.delete(f"run/checkpoint-4/{LOST}")
    found = seen(store, "checkpoint-4")
    assert (found.missing_lines, found.awaited_nodes) == (
        (f"node1: uploaded {LOST}, which is no longer in the store",),
        ("node1",),
    )


def test_what_is_not_arriving_lacks_nobody() -> None:
    store = MemoryStore()
    two_nodes(store)
    whole = seen(store, "checkpoint-4")
    assert explain_missing([whole]) == (whole,)
    assert (whole.gaps, whole.missing_lines) == ((), ())
    assert whole.ranks == (("node0", "0"), ("node1", "1"))
    assert explain_missing([replace(whole, status="INCOMPLETE")])[0].missing_lines == ()


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 7], "0-2,7"), ([9, 8, 1], "1,8-9")]
)
def test_ranks_are_written_as_ranges_and_read_again(ranks: list[int], text: str) -> None:
    assert show_ranks(ranks) == text
    assert read_ranks(text) == set(ranks)
