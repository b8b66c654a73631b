from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.names import parse_record_name
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.memory import MemoryStore
from tests.dying import Crash, Dying
from tests.filled import DEMO, FIRST, SECOND, contents, flip, put, read, send, two_nodes
from tests.heads import Consolidated, consolidate_due

MODEL = "run/consolidated/checkpoint-4/model.safetensors"
CONFIG = "run/consolidated/checkpoint-4/config.json"
SHARD = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
ZERO_SHARD = "run/checkpoint-4/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"
BASE = HeadOptions(config_from={"run": str(DEMO / "base")})
VECTORS = Path(__file__).parent / "vectors"


def made(result: Consolidated) -> list[str]:
    return [m.location for m in result.made]


def model_records(store: MemoryStore) -> list[str]:
    parsed = {e.name: parse_record_name(e.name) for e in store.names("")}
    return [name for name, p in parsed.items() if p and p.kind == "model"]


@pytest.mark.parametrize("name", ["hf-fsdp2-2node", "hf-zero3-2node"])
def test_two_nodes_shards_become_the_model_that_the_framework_gathered(name: str) -> None:
    store = MemoryStore()
    for node in ("node0", "node1"):
        send(store, VECTORS / name / node / "out" / "checkpoint-4", node)
    assert made(consolidate_due(store, BASE)) == ["checkpoint-4"]
    assert body(read(store, MODEL)) == body((VECTORS / name / "reference" / "full.safetensors").read_bytes())


def body(data: bytes) -> dict[str, bytes]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {k: data[8 + size + v["data_offsets"][0] : 8 + size + v["data_offsets"][1]] for k, v in header.items()}


def test_what_was_made_is_consolidated_and_not_made_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    before = contents(store)
    again = consolidate_due(store, BASE)
    assert again.catalogue.readable[0].status == "CONSOLIDATED"
    assert (again.made, contents(store)) == ((), before)


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_a_head_that_dies_anywhere_is_finished_by_the_next_with_the_same_bytes_and_one_model_record(kind: str) -> None:
    whole = MemoryStore()
    two_nodes(whole, kind)
    consolidate_due(whole, BASE)
    for lives in itertools.count():
        store = MemoryStore()
        two_nodes(store, kind)
        try:
            consolidate_due(Dying(store, lives), BASE)
        except Crash:
            assert not model_records(store) or contents(store) == contents(whole)
            consolidate_due(store, BASE)
            assert contents(store) == contents(whole)
        else:
            break
    assert lives > 3 * 6  # six files and a model record, three moments each


def test_half_a_checkpoint_is_not_merged() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    result = consolidate_due(store, BASE)
    assert (result.made, result.failed, result.catalogue.readable[0].status) == ((), (), "ARRIVING")


def test_halves_of_two_saves_in_one_location_are_not_merged() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1", at=FIRST + 3600 * SECOND)
    result = consolidate_due(store, BASE)
    assert (result.made, result.catalogue.readable[0].status) == ((), "CONFLICT")


def test_what_is_retired_is_left_alone() -> None:
    store = MemoryStore()
    two_nodes(store)
    names = tuple(e.name for e in store.names("run/.ckptsync/"))
    put(store, Tombstone("run", "checkpoint-4", "checkpoint-4", 0, names, "old"))
    assert consolidate_due(store, BASE).made == ()


def test_a_damaged_shard_is_never_merged_and_stops_no_other_location() -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    flip(store, SHARD, 50_000)
    result = consolidate_due(store, BASE)
    assert made(result) == ["checkpoint-5"]
    assert [(f.location, type(f.error)) for f in result.failed] == [("checkpoint-4", Corrupt)]
    assert MODEL not in contents(store)


def test_whatever_bit_of_a_shard_is_flipped_the_model_is_the_true_one_or_is_not_made() -> None:
    whole = MemoryStore()
    two_nodes(whole, "zero3")
    consolidate_due(whole, BASE)
    made_anyway = []
    for at in range(0, whole.size(ZERO_SHARD), 1_001):
        store = MemoryStore()
        two_nodes(store, "zero3")
        flip(store, ZERO_SHARD, at)
        made_anyway += made(consolidate_due(store, BASE))
        assert contents(store).get(MODEL, "") in ("", contents(whole)[MODEL])
    assert made_anyway  # the optimizer's own state is not read for a model


def test_a_format_without_any_check_of_its_own_is_checked_all_the_same(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "model.safetensors").write_bytes((VECTORS / "hf-fsdp2-2node/reference/full.safetensors").read_bytes())
    send(store, tmp_path, "node0")
    flip(store, "run/checkpoint-4/model.safetensors", -1)
    assert [type(f.error) for f in consolidate_due(store, BASE).failed] == [Corrupt]
    flip(store, "run/checkpoint-4/model.safetensors", -1)
    assert made(consolidate_due(store, BASE)) == ["checkpoint-4"]
