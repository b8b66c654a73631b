"""Who can do what about which damage.  Pure, so that what is shown is what is done."""

from __future__ import annotations

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.head.repairing import Ground, How, NodeWord, plan
from ckptsync.records.names import RecordName
from ckptsync.records.report import Finding, Level, Verdict
from ckptsync.records.state import Snapshot, standing
from ckptsync.stores.memory import MemoryStore
from tests.filled import put, report_on, two_nodes

SHARD = "checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
RNG = "checkpoint-4/rng_state_1.pth"


def snapshot(store: MemoryStore) -> Snapshot:
    (found,) = fresh(store).locations
    return found


def said(*reports: tuple[int, Verdict, tuple[str, ...], Level]) -> Snapshot:
    """A location with reports: number, verdict, names of damaged files, level."""
    store = MemoryStore()
    two_nodes(store)
    for n, verdict, names, level in reports:
        put(store, report_on(snapshot(store), n, verdict, [Finding("digest", name, "") for name in names], level))
    return snapshot(store)


def planned(names: tuple[str, ...], **nodes: NodeWord) -> list[tuple[str, How]]:
    seen = said((1, "damaged", names, "digest"))
    found = plan("run", "checkpoint-4", seen, standing(seen), Ground(nodes))
    return [(part.name, part.how) for part in found.parts]


def test_a_node_that_runs_is_asked_unless_it_says_that_it_has_it_no_more() -> None:
    (report,) = said((1, "damaged", (SHARD,), "digest")).conditions.proof.damage
    alive, gone = NodeWord(is_alive=True), NodeWord(is_alive=False)
    assert planned((SHARD,), node1=alive) == [(SHARD, "ask")]
    assert planned((SHARD,), node1=gone) == planned((SHARD,), node0=alive) == [(SHARD, "away")]
    assert planned((SHARD,), node1=NodeWord(is_alive=True, lacks={report: (SHARD,)})) == [(SHARD, "lost")]
    assert planned((SHARD,), node1=NodeWord(is_alive=True, lacks={report: (RNG,)})) == [(SHARD, "ask")]


@pytest.mark.parametrize(("name", "told"), [(SHARD, "no model can be made"), (RNG, "the model does not need it")])
def test_what_is_lost_is_said_with_what_follows(name: str, told: str) -> None:
    seen = said((1, "damaged", (name,), "digest"))
    lacks = NodeWord(is_alive=True, lacks=dict.fromkeys(seen.conditions.proof.damage, (name,)))
    found = plan("run", "checkpoint-4", seen, standing(seen), Ground({"node1": lacks}))
    assert found.exit_code == 10
    assert "states of rank 1" in found.parts[0].consequences
    assert told in found.parts[0].consequences[-1]


def test_what_a_later_report_no_longer_finds_is_over() -> None:
    still = said((1, "damaged", (SHARD, RNG), "digest"), (2, "damaged", (RNG,), "digest"))
    assert {f.name for f in standing(still)} == {RNG}
    less = said((1, "damaged", (SHARD,), "digest"), (2, "damaged", (RNG,), "stat"))
    assert {f.name for f in standing(less)} == {SHARD, RNG}, "who reads less answers less"


def test_names_that_no_record_binds_are_nobodys_to_repair() -> None:
    for name in ("../other/x", "checkpoint-4/nothing", "consolidated/checkpoint-4/model.safetensors", ""):
        assert planned((name,), node1=NodeWord(is_alive=True)) == []


def fault(kind: str, error: Exception) -> Fault:
    node = "node1" if kind == "manifest" else ""
    record = RecordName("run", "checkpoint-4", kind, node, 0, "0" * 16)  # type: ignore[arg-type]
    return Fault(str(record), record, error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "error", "how"),
    [
        ("manifest", Corrupt("x"), "ask"),
        ("model", Corrupt("x"), "rebuild"),
        ("tombstone", Corrupt("x"), "rebuild"),
        ("keep", Corrupt("x"), "rebuild"),
        ("report", Corrupt("x"), "ignore"),
        ("manifest", Unsupported("x"), "later"),
    ],
)
def test_records_that_cannot_be_read(kind: str, error: Exception, how: How) -> None:
    ground = Ground({"node1": NodeWord(is_alive=True)}, {}, [fault(kind, error)])
    assert [part.how for part in plan("run", "checkpoint-4", None, (), ground).parts] == [how]


def test_a_manifest_that_its_node_cannot_write_again_is_lost() -> None:
    bad = fault("manifest", Corrupt("x"))
    ground = Ground({"node1": NodeWord(is_alive=True, lacks={bad.name: ()})}, {}, [bad])
    assert plan("run", "checkpoint-4", None, (), ground).exit_code == 10
