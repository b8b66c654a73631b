from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt
from ckptsync.head.consolidate import HeadOptions, HeadResult, Memory, tick
from ckptsync.merge.plan import Options
from ckptsync.records.names import parse_record_name
from ckptsync.records.report import Finding
from ckptsync.records.state import Snapshot
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.memory import MemoryStore
from tests.dying import Crash, Dying
from tests.filled import DEMO, FIRST, SECOND, contents, flip, put, read, report_on, send, two_nodes

MODEL = "run/consolidated/checkpoint-4/model.safetensors"
CONFIG = "run/consolidated/checkpoint-4/config.json"
SHARD = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
BASE = HeadOptions(config_from={"run": str(DEMO / "base")})
VECTORS = Path(__file__).parent / "vectors"


def look(store: MemoryStore) -> Snapshot:
    return tick(store, BASE, 0.0).catalogue.snapshots[0]


def complain(store: MemoryStore, name: str, n: int = 0) -> None:
    finding = Finding("digest", name.removeprefix("run/"), "bytes differ")
    put(store, report_on(look(store), n, "damaged", [finding]))


def made(result: HeadResult) -> list[str]:
    return [m.place for m in result.made]


def seals(store: MemoryStore) -> list[str]:
    parsed = {e.name: parse_record_name(e.name) for e in store.names("")}
    return [name for name, p in parsed.items() if p and p.kind == "seal"]


@pytest.mark.parametrize("name", ["hf-fsdp2-2node", "hf-zero3-2node"])
def test_two_nodes_shards_become_the_model_that_the_framework_gathered(name: str) -> None:
    store = MemoryStore()
    for node in ("node0", "node1"):
        send(store, VECTORS / name / node / "out" / "checkpoint-4", node)
    assert made(tick(store, BASE, 0.0)) == ["checkpoint-4"]
    assert body(read(store, MODEL)) == body((VECTORS / name / "reference" / "full.safetensors").read_bytes())


def body(data: bytes) -> dict[str, bytes]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {k: data[8 + size + v["data_offsets"][0] : 8 + size + v["data_offsets"][1]] for k, v in header.items()}


def test_what_was_made_is_sealed_and_not_made_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    before = contents(store)
    again = tick(store, BASE, 0.0)
    assert again.catalogue.snapshots[0].word == "CONSOLIDATED"
    assert (again.made, contents(store)) == ((), before)


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_a_head_that_dies_anywhere_is_finished_by_the_next_with_the_same_bytes_and_one_seal(kind: str) -> None:
    whole = MemoryStore()
    two_nodes(whole, kind)
    tick(whole, BASE, 0.0)
    for lives in itertools.count():
        store = MemoryStore()
        two_nodes(store, kind)
        try:
            tick(Dying(store, lives), BASE, 0.0)
        except Crash:
            assert not seals(store) or contents(store) == contents(whole)
            tick(store, BASE, 0.0)
            assert contents(store) == contents(whole)
        else:
            break
    assert lives > 3 * 6  # six files and a seal, three moments each


def test_half_a_checkpoint_is_not_merged() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    result = tick(store, BASE, 0.0)
    assert (result.made, result.failed, result.catalogue.snapshots[0].word) == ((), (), "ARRIVING")


def test_halves_of_two_saves_in_one_place_are_not_merged() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1", at=FIRST + 3600 * SECOND)
    result = tick(store, BASE, 0.0)
    assert (result.made, result.catalogue.snapshots[0].word) == ((), "AMBIGUOUS")


def test_what_is_retired_is_left_alone() -> None:
    store = MemoryStore()
    two_nodes(store)
    names = tuple(e.name for e in store.names("run/.ckptsync/"))
    put(store, Tombstone("run", "checkpoint-4", "checkpoint-4", 0, names, "old"))
    assert tick(store, BASE, 0.0).made == ()


def test_a_damaged_shard_is_never_merged_and_stops_no_other_place() -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    flip(store, SHARD, 50_000)
    result = tick(store, BASE, 0.0)
    assert made(result) == ["checkpoint-5"]
    assert [(f.place, type(f.error)) for f in result.failed] == [("checkpoint-4", Corrupt)]
    assert MODEL not in contents(store)


def test_every_bit_that_is_read_counts() -> None:
    for at in range(0, 51_805, 5_003):
        store = MemoryStore()
        two_nodes(store)
        pristine = read(store, SHARD)
        flip(store, SHARD, at)
        if tick(store, BASE, 0.0).made:  # that byte is in no tensor: the model is right all the same
            model = read(store, MODEL)
            store.write(SHARD, [pristine])
            store.delete(MODEL)
            tick(store, BASE, 0.0)
            assert read(store, MODEL) == model


def test_a_failure_is_not_tried_again_until_something_changes_or_an_hour_has_passed() -> None:
    store, memory = MemoryStore(), Memory()
    two_nodes(store)
    flip(store, SHARD, 50_000)
    assert tick(store, BASE, 0.0, memory).failed[0].is_new
    flip(store, SHARD, 50_000)
    waiting = tick(store, BASE, 100.0, memory)
    assert (waiting.made, waiting.failed[0].is_new) == ((), False)
    assert made(tick(store, BASE, 3601.0, memory)) == ["checkpoint-4"]


def test_a_report_lets_a_failure_be_tried_again_at_once() -> None:
    store, memory = MemoryStore(), Memory()
    two_nodes(store)
    flip(store, SHARD, 50_000)
    snapshot = tick(store, BASE, 0.0, memory).catalogue.snapshots[0]
    flip(store, SHARD, 50_000)
    put(store, report_on(snapshot, 0, "ok"))
    assert made(tick(store, BASE, 1.0, memory)) == ["checkpoint-4"]


def test_a_damaged_model_file_is_made_again_from_the_shards() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    before = contents(store)
    flip(store, MODEL, 30_000)
    complain(store, MODEL)
    assert tick(store, BASE, 0.0).made[0].files == ("model.safetensors",)
    assert {name: d for name, d in contents(store).items() if "report" not in name} == before


def test_a_model_file_that_is_gone_is_made_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    before = contents(store)
    store.delete(MODEL)
    store.delete(CONFIG)
    assert tick(store, BASE, 0.0).made[0].files == ("config.json", "model.safetensors")
    assert contents(store) == before


def test_the_index_of_a_model_in_several_files_can_be_made_again() -> None:
    store, options = MemoryStore(), replace(BASE, merge=Options(max_shard_size=9_000))
    two_nodes(store)
    tick(store, options, 0.0)
    before = contents(store)
    store.delete("run/consolidated/checkpoint-4/model.safetensors.index.json")
    store.delete("run/consolidated/checkpoint-4/model-00002-of-00005.safetensors")
    assert len(tick(store, BASE, 0.0).made[0].files) == 2  # this head's own options do not matter
    assert contents(store) == before


def test_a_model_whose_sources_have_changed_is_not_mended_into_something_else(tmp_path: Path) -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    store.delete(CONFIG)
    (tmp_path / "config.json").write_text("{}")
    failed = tick(store, HeadOptions(config_from={"run": str(tmp_path)}), 0.0).failed
    assert "not what the seal says" in str(failed[0].error)
    assert CONFIG not in contents(store)


def test_a_complaint_about_bytes_that_are_well_writes_nothing() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    complain(store, MODEL)
    before = contents(store)
    assert tick(store, BASE, 0.0).made == ()
    assert contents(store) == before


def test_configuration_that_comes_with_the_final_model_is_added_under_a_further_seal() -> None:
    store = MemoryStore()
    two_nodes(store)
    assert "no config.json" in tick(store, HeadOptions(), 0.0).made[0].notes[0]
    weights = contents(store)[MODEL]
    send(store, DEMO / "base", "node0", "final")
    assert "config.json" in tick(store, HeadOptions(), 0.0).made[0].files
    after = tick(store, HeadOptions(), 0.0)
    assert (after.made, contents(store)[MODEL], len(seals(store))) == ((), weights, 2)
    assert "config.json=final" in after.catalogue.snapshots[0].records.seals[seals(store)[1]].options["config"]


def test_a_late_file_that_the_model_does_not_need_leaves_the_seal() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    late = look(store).manifests[1].manifest
    put(store, replace(late, n=1, files=(replace(late.files[0], path="README.md"),)))
    result = tick(store, BASE, 0.0)
    assert (result.made, result.catalogue.snapshots[0].facets.sealed.holds) == ((), True)


def test_other_options_do_not_write_over_what_is_sealed() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    before = contents(store)
    assert tick(store, replace(BASE, merge=Options(dtype="fp16")), 0.0).made == ()
    assert contents(store) == before


def test_a_damaged_seal_is_written_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    tick(store, BASE, 0.0)
    before = contents(store)
    flip(store, seals(store)[0], 100)
    tick(store, BASE, 0.0)
    assert contents(store) == before
