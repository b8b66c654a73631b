"""What should be there, from manifests and the model record."""

from __future__ import annotations

from ckptsync.records.names import file_name
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify.expected import expected, missing_parts, stat
from tests.verified import LOCATION, RUN, WHOLE, arrive, location, whole_store

SHARD = {"pytorch_model_fsdp_0/__0_0.distcp": b"x" * 100}


def test_files_of_manifests_and_of_the_model_record_are_expected_where_they_lie() -> None:
    found = expected(location(whole_store()))
    assert [f.shown for f in found] == [
        "checkpoint-4/config.json",
        "checkpoint-4/model.safetensors",
        "consolidated/checkpoint-4/model.safetensors",
        "consolidated/checkpoint-4/config.json",
    ]
    assert [t.name for f in found if f.is_consolidated for t in f.tensors] == ["a", "b", "c"]
    assert all(f.name == f"{RUN}/{f.shown}" for f in found)


def test_a_nodes_own_copy_of_a_shared_name_is_expected_in_its_folder() -> None:
    store = MemoryStore()
    arrive(store, {**WHOLE, "notes.txt": b"one"}, "n0")
    other = {"notes.txt": b"other"}
    arrive(store, other, "n1")
    copies = [f for f in expected(location(store)) if f.is_copy]
    assert [(f.path, f.shown, f.size) for f in copies] == [("notes.txt", ".ckptsync/checkpoint-4/files/n1/notes.txt", 5)]


def test_stat_tells_what_is_not_there_and_what_has_another_size() -> None:
    store = whole_store()
    store.delete(file_name(RUN, LOCATION, "config.json"))
    store.write(file_name(RUN, LOCATION, "model.safetensors"), [b"short"])
    seen = location(store)
    found = list(stat(expected(seen), seen.sizes))
    assert [(f.kind, f.name) for f in found] == [
        ("missing", "checkpoint-4/config.json"),
        ("size", "checkpoint-4/model.safetensors"),
    ]
    assert found[1].ranges == ((5, len(WHOLE["model.safetensors"])),)


def test_what_no_node_has_sent_is_a_note() -> None:
    store = MemoryStore()
    arrive(store, SHARD)
    (note,) = missing_parts(location(store))
    assert (note.kind, note.name) == ("note", LOCATION)
    assert list(missing_parts(location(whole_store()))) == []
