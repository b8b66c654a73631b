"""Conditions and the status of locations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ckptsync.records.location_status import (
    Condition,
    Conditions,
    LocationRecords,
    LocationState,
    Proof,
    describe_location,
    list_locations,
    proof,
    reading_order,
    status,
)
from ckptsync.records.manifest import Manifest
from ckptsync.records.manifest_groups import Sibling
from ckptsync.records.model_record import ModelFile, ModelRecord, ModelTensor, is_same_model
from ckptsync.records.report import Level, Report, Verdict
from ckptsync.records.save_decisions import Tombstone
from ckptsync.tensors import Demands
from tests.records.test_manifest_groups import LATER, entry, known, manifest, of_rank

YES, NO = Condition(holds=True), Condition(holds=False)
DAMAGED, PROVEN, UNPROVEN = Proof(damage=("r",)), Proof(holds=True), Proof()
SIZES = {"run/checkpoint-5/dcp/__0_0.distcp": 5, "run/checkpoint-5/dcp/__1_0.distcp": 5}
DEMANDS = Demands({"dcp/__0_0.distcp": 5, "dcp/__1_0.distcp": None}, {"rng_state_0.pth": None}, 2)
A0, B1 = replace(of_rank(0, "a"), demands=DEMANDS), of_rank(1, "b")
NAMES = tuple(k.name for k in known(A0, B1))


@pytest.mark.parametrize(
    ("model", "consolidated", "proven", "conflict", "retired", "expected"),
    [
        (NO, NO, UNPROVEN, "", "", "INCOMPLETE"),
        (NO, YES, PROVEN, "", "", "INCOMPLETE"),
        (YES, NO, UNPROVEN, "", "", "COMPLETE"),
        (YES, NO, PROVEN, "", "", "COMPLETE"),
        (YES, YES, UNPROVEN, "", "", "CONSOLIDATED"),
        (YES, YES, PROVEN, "", "", "VERIFIED"),
        (YES, YES, DAMAGED, "", "", "DAMAGED"),
        (NO, NO, DAMAGED, "", "", "DAMAGED"),
        (YES, YES, DAMAGED, "two saves", "", "CONFLICT"),
        (YES, YES, PROVEN, "two saves", "", "CONFLICT"),
        (YES, YES, DAMAGED, "two saves", "too old", "RETIRED"),
        (NO, NO, UNPROVEN, "", "too old", "RETIRED"),
    ],
)
def test_the_one_word(
    *,
    model: Condition,
    consolidated: Condition,
    proven: Proof,
    conflict: str,
    retired: str,
    expected: str,
) -> None:
    assert status(Conditions(model, NO, consolidated, proven, conflict, retired)) == expected


def seen(
    *manifests: Manifest,
    sizes: Mapping[str, int] = SIZES,
    model_records: Mapping[str, ModelRecord] | None = None,
    tombstones: tuple[Tombstone, ...] = (),
) -> LocationState:
    pairs = known(*manifests)
    records = LocationRecords(
        {k.name: k.manifest for k in pairs},
        model_records or {},
        {},
        {str(i): t for i, t in enumerate(tombstones)},
    )
    found = describe_location("checkpoint-5", records, pairs, sizes)
    assert found
    return found


def model_record(n: int = 0, manifests: tuple[str, ...] = NAMES) -> ModelRecord:
    return ModelRecord(
        "run", "checkpoint-5", "checkpoint-5", n, manifests, {}, (ModelFile("m", 9, "0" * 64),), ()
    )


def test_all_that_metadata_demands_is_complete() -> None:
    whole = seen(A0, B1)
    assert (whole.status, whole.conditions.model.evidence) == ("COMPLETE", ())
    assert set(whole.present()) == {"dcp/__0_0.distcp", "dcp/__1_0.distcp"}


@pytest.mark.parametrize(
    ("manifests", "evidence"),
    [
        ((A0,), "dcp/__1_0.distcp: no node has uploaded it"),
        ((B1,), "no file here says what a whole model is"),
        (
            (manifest("a", entry("weights.npz", "x", LATER)),),
            "of no layout that ckptsync merges (`ckptsync help formats`): stored as it is",
        ),
        (
            (replace(A0, demands=Demands({"dcp/__0_0.distcp": 6})),),
            "dcp/__0_0.distcp: 5 bytes, expected 6",
        ),
    ],
)
def test_what_a_whole_model_lacks_is_said(manifests: tuple[Manifest, ...], evidence: str) -> None:
    assert seen(*manifests).evidence == (evidence,)


def test_a_file_that_both_uses_lack_is_named_once() -> None:
    demands = replace(DEMANDS, resume=DEMANDS.model)
    missing = seen(replace(A0, demands=demands)).conditions.resume.evidence
    assert missing == ("dcp/__1_0.distcp: no node has uploaded it",)


def test_a_part_that_may_belong_here_is_pointed_at() -> None:
    later = replace(
        B1,
        location="checkpoint-5~00000000",
        started=B1.started + 3 * 10**9,
        ended=B1.ended + 3 * 10**9,
    )
    pairs = known(A0, later)
    records = LocationRecords({pairs[0].name: A0}, {}, {}, {})
    found = describe_location("checkpoint-5", records, pairs, SIZES)
    assert found
    assert found.evidence == ("dcp/__1_0.distcp: b uploaded it to checkpoint-5~00000000",)
    assert list(found.siblings) == [
        Sibling("checkpoint-5~00000000", ("b",), ("rng_state_0.pth: no part has it",))
    ]


def test_a_file_that_is_not_listed_is_named() -> None:
    lost = seen(A0, B1, sizes={"run/checkpoint-5/dcp/__0_0.distcp": 4})
    assert lost.evidence == (
        "dcp/__0_0.distcp: a uploaded 5 bytes, but the store has 4",
        "dcp/__1_0.distcp: b uploaded 5 bytes, but it is not in the store",
    )
    assert lost.present() == {}


def test_resuming_needs_more_than_the_model() -> None:
    assert seen(A0, B1).conditions.resume == Condition(
        holds=False, evidence=("rng_state_0.pth: no node has uploaded it",)
    )
    assert seen(B1).conditions.resume.evidence == (
        "no file here says what a resumed training needs",
    )
    late = replace(manifest("a", entry("rng_state_0.pth", "x", LATER)), n=1)
    assert seen(
        A0, B1, late, sizes={**SIZES, "run/checkpoint-5/rng_state_0.pth": 1}
    ).conditions.resume.holds


def test_manifests_of_two_saves_are_ambiguous_and_locate_nothing() -> None:
    both = seen(A0, B1, of_rank(0, "c", "other"))
    assert (both.status, both.files) == ("CONFLICT", {})
    assert "both have files of rank 0" in both.evidence[0]


def test_a_model_record_counts_while_all_its_manifests_do() -> None:
    listed = {**SIZES, "run/consolidated/checkpoint-5/m": 9}
    assert seen(A0, B1, model_records={"s": model_record()}, sizes=listed).status == "CONSOLIDATED"
    assert (
        seen(A0, B1, model_records={"s": model_record(manifests=("other",))}, sizes=listed).status
        == "COMPLETE"
    )
    of_nothing = {"s": model_record(manifests=())}
    assert seen(A0, B1, model_records=of_nothing, sizes=listed).status == "COMPLETE"
    assert (
        seen(
            A0,
            B1,
            replace(manifest("a", entry("late")), n=1),
            model_records={"s": model_record()},
            sizes=listed,
        ).status
        == "CONSOLIDATED"
    )


def test_a_model_record_whose_file_is_not_there_does_not_hold() -> None:
    assert seen(A0, B1, model_records={"s": model_record()}).evidence == (
        "consolidated m: 9 bytes were written, but it is not in the store",
    )


def test_of_two_model_records_with_one_number_the_first_by_name_counts_and_it_is_said() -> None:
    listed = {**SIZES, "run/consolidated/checkpoint-5/m": 9}
    found = seen(A0, B1, model_records={"y": model_record(), "x": model_record()}, sizes=listed)
    assert (found.model_record_name, found.status) == ("x", "CONSOLIDATED")
    assert "y: another model record of the same number" in found.conditions.consolidated.evidence[0]
    assert (
        seen(
            A0, B1, model_records={"y": model_record(1), "x": model_record()}, sizes=listed
        ).model_record_name
        == "y"
    )


def test_a_tombstone_retires_the_save_that_it_names_and_what_comes_late() -> None:
    stone = Tombstone("run", "checkpoint-5", "checkpoint-5", 0, (NAMES[0],), "over budget")
    assert seen(A0, B1, tombstones=(stone,)).evidence == ("over budget",)
    assert (
        seen(A0, B1, tombstones=(replace(stone, manifests=("another save",)),)).status == "COMPLETE"
    )


def report(
    n: int,
    verdict: Verdict,
    level: Level = "digest",
    manifests: tuple[str, ...] = NAMES,
    of: str = "s",
) -> Report:
    return Report("run", "checkpoint-5", "checkpoint-5", n, level, verdict, manifests, of, 0, ())


def state(*reports: Report) -> str:
    found = proof({f"r{i}": r for i, r in enumerate(reports)}, set(NAMES), "s")
    return "damaged" if found.damage else "proven" if found.holds else "unproven"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], "unproven"),
        ([report(0, "ok")], "proven"),
        ([report(0, "ok", "load")], "proven"),
        ([report(0, "ok", "stat")], "unproven"),
        ([report(0, "ok", of="another model record")], "unproven"),
        ([report(0, "ok", manifests=NAMES[:1])], "unproven"),
        ([report(0, "incomplete")], "unproven"),
        ([report(0, "ok"), report(1, "ok", "stat")], "proven"),
        ([report(0, "ok"), report(1, "damaged", "stat")], "damaged"),
        ([report(0, "damaged"), report(1, "ok")], "proven"),
        ([report(0, "damaged"), report(1, "ok", "stat")], "damaged"),
        ([report(0, "damaged", "load"), report(1, "ok", "digest")], "damaged"),
        ([report(0, "damaged"), report(1, "incomplete")], "unproven"),
        ([report(3, "damaged"), report(3, "ok")], "damaged"),
        ([report(3, "damaged"), report(2, "ok")], "damaged"),
        (
            [
                report(0, "damaged", "stat"),
                report(1, "damaged", "digest"),
                report(2, "ok", "digest"),
            ],
            "proven",
        ),
        ([report(0, "damaged", manifests=("gone",))], "damaged"),
    ],
)
def test_what_reports_prove(reports: list[Report], expected: str) -> None:
    assert state(*reports) == state(*reversed(reports)) == expected


def test_the_report_that_is_shown_is_the_one_the_verdict_rests_on() -> None:
    shown = proof({"a": report(0, "ok", "load"), "b": report(1, "ok", "stat")}, set(NAMES), "s")
    assert (shown.report, shown.verdict, shown.level) == ("a", "ok", "load")
    worse = proof({"a": report(1, "ok"), "b": report(1, "damaged")}, set(NAMES), "s")
    assert (worse.report, worse.damage) == ("b", ("b",))


def test_a_model_is_the_same_by_its_tensors_and_second_copies_of_them() -> None:
    def of(**tensors: tuple[tuple[int, ...], str]) -> ModelRecord:
        made = tuple(
            ModelTensor(n, "F32", shape, "m", 0, 4, digest)
            for n, (shape, digest) in tensors.items()
        )
        return ModelRecord("run", "checkpoint-5", "checkpoint-5", 0, (), {}, (), made)

    whole = of(embed=((4, 2), "e"), norm=((2,), "n"))
    assert is_same_model(of(embed=((4, 2), "x"), norm=((2,), "y")), whole), (
        "other weights of one model"
    )
    assert is_same_model(of(embed=((4, 2), "x"), norm=((2,), "y"), head=((4, 2), "x")), whole), (
        "a tied weight, stored twice"
    )
    for other in (
        of(embed=((4, 2), "e")),
        of(embed=((5, 2), "e"), norm=((2,), "n")),
        of(**{"x.embed": ((4, 2), "e")}),
        of(),
    ):
        assert not is_same_model(other, whole)
    assert not is_same_model(
        of(embed=((4, 2), "x"), norm=((2,), "y"), head=((4, 2), "z")), whole
    ), "it has a head of its own"
    assert not is_same_model(whole, of())


def test_people_read_by_run_and_step() -> None:
    locations = [
        ("b", "checkpoint-1"),
        ("a", "checkpoint-10"),
        ("a", "checkpoint-9~1"),
        ("a", "checkpoint-9"),
        ("a", "final"),
    ]
    assert sorted(locations, key=lambda p: reading_order(*p)) == [
        ("a", "checkpoint-9"),
        ("a", "checkpoint-9~1"),
        ("a", "checkpoint-10"),
        ("a", "final"),
        ("b", "checkpoint-1"),
    ]
    assert reading_order("run", "step-7\u00b2") > reading_order("run", "step-7")


def test_a_location_knows_its_own_files_and_no_others() -> None:
    listed = (
        "checkpoint-5/a",
        "checkpoint-50/a",
        "checkpoint-5~1/a",
        "consolidated/checkpoint-5/m",
        ".ckptsync/checkpoint-5/files/b/a",
    )
    found = list_locations({"m": of_rank(0, "a")}, {f"run/{name}": 1 for name in listed})
    assert sorted(found[0].sizes) == [
        "run/.ckptsync/checkpoint-5/files/b/a",
        "run/checkpoint-5/a",
        "run/consolidated/checkpoint-5/m",
    ]


def test_every_location_of_a_checkpoint_tells_about_the_others() -> None:
    moved = {
        "x": of_rank(0, "a"),
        "y": replace(of_rank(0, "a", location="checkpoint-5~1"), supersedes=("x",)),
    }
    assert [s.location for s in list_locations(moved, {})] == ["checkpoint-5~1"]
    rivals = {
        "x": of_rank(0, "a"),
        "y": of_rank(1, "b"),
        "z": of_rank(1, "c", "second", location="checkpoint-5~1"),
    }
    assert [s.status for s in list_locations(rivals, {})] == ["CONFLICT", "CONFLICT"]
    later = {"x": of_rank(0, "a"), "z": of_rank(1, "c", "second", LATER, location="checkpoint-5~1")}
    assert [s.status for s in list_locations(later, {})] == ["INCOMPLETE", "INCOMPLETE"]


def test_without_a_manifest_or_with_an_unreadable_record_there_is_no_location() -> None:
    stone = Tombstone("run", "checkpoint-5", "checkpoint-5", 0, (), "old")
    assert list_locations({"t": stone}, {}) == ()
    assert list_locations({"m": of_rank(0, "a")}, {}, {("run", "checkpoint-5")}) == ()
