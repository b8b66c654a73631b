"""Who can do what about which damage.  Pure, so that what is shown is what is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ckptsync.catalogue.uncached import StoreState, read_state
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.gc import RetentionRequest, apply_retention, read_manifests
from ckptsync.head.removal import LEASE, keep, release, write_tombstone
from ckptsync.head.repair import How, NodeState, Repair, RepairPlan, plan_repair, repair
from ckptsync.head.retention_rules import Rules
from ckptsync.records.io import Fault
from ckptsync.records.location_status import LocationState, unanswered_findings
from ckptsync.records.report import FindingKind, Level, Verdict, VerifyFinding
from ckptsync.records.save_decisions import Scope, Stage
from ckptsync.records.store_paths import RecordName, node_file_name
from ckptsync.stores.memory import MemoryStore
from tests.head.test_consolidate import BASE
from tests.support.filled_stores import entry, flip, put, report_on, two_nodes
from tests.support.retention_stores import FIRST, fill
from tests.support.verified_stores import manifest

SHARD = "checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
RNG = "checkpoint-4/rng_state_1.pth"


def location_state(store: MemoryStore) -> LocationState:
    (found,) = read_state(store).locations
    return found


def said(*reports: tuple[int, Verdict, tuple[str, ...], Level]) -> LocationState:
    """A location with reports: number, verdict, names of damaged files, level."""
    store = MemoryStore()
    two_nodes(store)
    for n, verdict, names, level in reports:
        put(
            store,
            report_on(
                location_state(store),
                n,
                verdict,
                [VerifyFinding("digest", name, "") for name in names],
                level,
            ),
        )
    return location_state(store)


def plan_of(
    seen: LocationState | None, nodes: Mapping[str, NodeState], *faults: Fault
) -> RepairPlan:
    found = StoreState((seen,) if seen else (), faults, {})
    return plan_repair(
        found, "run", "checkpoint-4", unanswered_findings(seen) if seen else (), nodes
    )


@pytest.mark.parametrize(
    ("node", "is_alive", "lacks", "expected"),
    [
        ("node1", True, (), {SHARD: "ask", RNG: "ask"}),
        ("node1", False, (), {SHARD: "away", RNG: "away"}),
        ("node0", True, (), {SHARD: "away", RNG: "away"}),
        ("node1", True, (RNG,), {RNG: "lost", SHARD: "ask"}),
        ("node1", False, (RNG, SHARD), {SHARD: "lost", RNG: "lost"}),
    ],
)
def test_a_node_that_runs_is_asked_for_what_it_does_not_lack_and_the_worst_comes_first(
    node: str, *, is_alive: bool, lacks: tuple[str, ...], expected: dict[str, How]
) -> None:
    seen = said((1, "damaged", (SHARD, RNG), "digest"))
    reports = dict.fromkeys(seen.conditions.proof.damage, lacks)
    plan = plan_of(seen, {node: NodeState(is_alive=is_alive, lacks=reports)})
    assert [(part.name, part.how) for part in plan.parts] == [*expected.items()]


@pytest.mark.parametrize(
    ("name", "told"), [(SHARD, "no model can be built"), (RNG, "the model does not need this file")]
)
def test_what_is_lost_is_said_with_what_follows(name: str, told: str) -> None:
    seen = said((1, "damaged", (name,), "digest"))
    lacks = NodeState(is_alive=True, lacks=dict.fromkeys(seen.conditions.proof.damage, (name,)))
    found = plan_of(seen, {"node1": lacks})
    assert found.exit_code == 10
    assert "states of rank 1" in found.parts[0].consequences
    assert told in found.parts[0].consequences[-1]


def test_what_a_later_report_no_longer_finds_is_over() -> None:
    still = said((1, "damaged", (SHARD, RNG), "digest"), (2, "damaged", (RNG,), "digest"))
    assert {f.name for f in unanswered_findings(still)} == {RNG}
    less = said((1, "damaged", (SHARD,), "digest"), (2, "damaged", (RNG,), "stat"))
    assert {f.name for f in unanswered_findings(less)} == {SHARD, RNG}, (
        "who reads less answers less"
    )


def test_what_is_to_be_copied_and_has_moved_since_is_left_alone() -> None:
    store = MemoryStore()
    two_nodes(store)
    before = location_state(store)
    moved = Repair("checkpoint-4/moved", "copy", "", source=f"run/{SHARD}")
    plan = RepairPlan("run", "checkpoint-4", (moved,))
    assert repair(store, plan, before, BASE) == ()
    assert location_state(store) == before


def test_names_that_no_record_binds_are_nobodys_to_repair() -> None:
    for name in (
        "../other/x",
        "checkpoint-4/nothing",
        "consolidated/checkpoint-4/model.safetensors",
        "",
    ):
        seen = said((1, "damaged", (name,), "digest"))
        assert plan_of(seen, {"node1": NodeState(is_alive=True)}).parts == ()


def fault(kind: str, error: Exception) -> Fault:
    node = "node1" if kind == "manifest" else ""
    record = RecordName("run", "checkpoint-4", kind, node, 0, "0" * 16)  # type: ignore[arg-type]
    return Fault(str(record), record, error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "error", "how"),
    [
        ("manifest", Corrupt("x"), "ask"),
        ("model", Corrupt("x"), "rebuild"),
        ("tombstone", Corrupt("x"), "delete"),
        ("keep", Corrupt("x"), "delete"),
        ("report", Corrupt("x"), "ignore"),
        ("manifest", Unsupported("x"), "later"),
    ],
)
def test_records_that_cannot_be_read(kind: str, error: Exception, how: How) -> None:
    found = plan_of(None, {"node1": NodeState(is_alive=True)}, fault(kind, error))
    assert [part.how for part in found.parts] == [how]
    assert found.exit_code == (3 if how in ("ask", "later") else 0)


@pytest.mark.parametrize(
    ("is_verified", "kind", "how"),
    [(True, "digest", "copy"), (False, "digest", "away"), (True, "load", "away")],
)
def test_other_bytes_are_copied_from_a_verified_checkpoint_alone(
    *, is_verified: bool, kind: FindingKind, how: How
) -> None:
    store = MemoryStore()
    fill(store, LOCATION)
    fill(store, "checkpoint-2", FIRST + 3600, is_verified=is_verified)
    finding = VerifyFinding(kind, f"{LOCATION}/b.bin", "")
    damaged = next(s for s in read_state(store).locations if s.location == LOCATION)
    put(store, report_on(damaged, 9, "damaged", [finding], "load"))
    later = VerifyFinding("load", finding.name, "also says what its bytes mean")
    plan = plan_repair(read_state(store), "run", LOCATION, [finding, later], {})
    assert [part.how for part in plan.parts] == [how]


# What is done at once.

LAST = RetentionRequest(lambda _: Rules(keep_last=1), 0.0)
LOCATION = "checkpoint-1"


def filled() -> tuple[MemoryStore, str]:
    store = MemoryStore()
    name = fill(store, LOCATION)
    fill(store, "checkpoint-2", FIRST + 3600)
    return store, name


def stone(store: MemoryStore, manifest: str, stage: Stage, scope: Scope = "location") -> str:
    return write_tombstone(store, read_manifests(store, [manifest]), scope, stage, reason="old")


def repaired(store: MemoryStore) -> tuple[str, ...]:
    found = read_state(store, "run")
    seen = next((s for s in found.readable if s.location == LOCATION), None)
    return repair(store, plan_repair(found, "run", LOCATION, (), {}), seen, HeadOptions())


def names(store: MemoryStore, kind: str) -> list[str]:
    return [e.name for e in store.names(f"run/.ckptsync/{LOCATION}/") if f"/{kind}-" in e.name]


def stays_after_gc(store: MemoryStore) -> bool:
    """Return whether gc, called twice, leaves files of the location."""
    for _ in range(2):
        apply_retention(store, LAST)
    return bool([*store.names(f"run/{LOCATION}/")])


def test_what_a_damaged_keep_kept_is_kept_by_a_new_one() -> None:
    store, _ = filled()
    keep(store, "run", LOCATION, "the paper")
    (bad,) = names(store, "keep")
    flip(store, bad)
    assert len(repaired(store)) == 2
    assert bad not in names(store, "keep")
    assert stays_after_gc(store)
    assert release(store, "run", LOCATION)
    assert not stays_after_gc(store)


@pytest.mark.parametrize("before", [("marked",), ("marked", "begun")])
def test_what_a_damaged_tombstone_may_have_withdrawn_is_kept(before: tuple[Stage, ...]) -> None:
    store, manifest = filled()
    for stage in before:
        stone(store, manifest, stage)
    bad = stone(store, manifest, "withdrawn")
    flip(store, bad)
    assert len(repaired(store)) == 2
    assert bad not in names(store, "tombstone")
    for _ in range(int(LEASE)):  # seconds: this store's clock counts writes
        store.write("clock", [b""])
    assert stays_after_gc(store)
    assert not read_state(store).locations[0].conditions.retired


def test_what_is_deleted_in_part_is_finished_all_the_same() -> None:
    store, manifest = filled()
    stone(store, manifest, "marked")
    stone(store, manifest, "begun")
    flip(store, stone(store, manifest, "begun"))
    store.delete(f"run/{LOCATION}/a.bin")
    assert len(repaired(store)) == 2
    assert not stays_after_gc(store)


def test_a_damaged_report_goes_when_a_later_one_says_what_is() -> None:
    store, _ = filled()
    (good,) = names(store, "report")
    bad = good.replace("report-1-", "report-0-")
    store.write(bad, [b"x"])
    assert repaired(store) == (bad.removeprefix("run/"),)
    assert names(store, "report") == [good]
    flip(store, good)
    assert repaired(store) == (), "the next verification says what is"


def test_a_damaged_model_record_goes_when_a_later_one_says_what_is() -> None:
    store, _ = filled()
    record = next(s for s in read_state(store).locations if s.location == LOCATION).model_record
    assert record
    (bad,) = names(store, "model")
    good = put(store, replace(record, n=1))
    flip(store, bad)
    assert repaired(store) == (bad.removeprefix("run/"),)
    assert names(store, "model") == [good]


@pytest.mark.parametrize(
    ("run", "location", "path"),
    [
        ("run", ".ckptsync", "checkpoint-4/tombstone-0-0123456789abcdef.json"),
        ("run", "consolidated", "checkpoint-4/model.safetensors"),
        ("run/consolidated", "checkpoint-4", "model.safetensors"),
        (".ckptsync", "nodes", "n0.json"),
    ],
)
def test_a_manifest_of_a_location_that_is_none_has_nothing_written(
    run: str, location: str, path: str
) -> None:
    """Its files would be a run's records, models, or heartbeats."""
    store = MemoryStore()
    beside = node_file_name(run, location, "evil", "bytes")
    files = (entry(path, b"evil"), replace(entry("bytes", b"evil"), stored_as=beside))
    store.write(beside, [b"evil"])
    hostile = replace(manifest({}, "evil"), run=run, checkpoint=location, location=location)
    name = put(store, replace(hostile, files=files))
    before = [e.name for e in store.names("")]
    found = read_state(store)
    assert [f.name for f in found.faults] == [name]
    assert found.locations == ()
    findings = [VerifyFinding("missing", f"{location}/{path}", "")]
    plan = plan_repair(found, run, location, findings, {})
    assert [(p.how, "delete it" in p.words) for p in plan.parts] == [("later", True)]
    repair(store, plan, None, HeadOptions())
    part = Repair(f"{location}/{path}", "delete", "")
    with pytest.raises(Corrupt, match=r"the store itself|not one directory's name"):
        repair(store, replace(plan, parts=(part,)), None, HeadOptions())
    outside = Repair("checkpoint-5/x", "delete", "")
    with pytest.raises(Corrupt, match="outside"):
        repair(store, RepairPlan("run", "checkpoint-4", (outside,)), None, HeadOptions())
    assert [e.name for e in store.names("")] == before
