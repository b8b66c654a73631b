"""What nothing speaks of goes, once nobody can be at work on it; and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptsync.head.gc import read_manifests
from ckptsync.head.orphans import IDLE, delete_orphans, find_orphans
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import DEMO, contents, put, send, two_nodes
from tests.support.retention_stores import fill, manifest_name

LATER = 2 * IDLE


def names(store: MemoryStore, now: float = LATER) -> list[str]:
    return [one.entry.name for one in find_orphans(store, now)]


def swept(store: MemoryStore, now: float = LATER) -> list[str]:
    return [one.entry.name for one in delete_orphans(store, list(find_orphans(store, now)), now)]


def test_what_records_name_is_not_orphaned() -> None:
    store = MemoryStore()
    two_nodes(store)
    fill(store, "checkpoint-5")
    send(store, DEMO / "zero3/node1/checkpoint-4", "node1", "checkpoint-4~other")
    before = contents(store)
    assert swept(store) == []
    assert contents(store) == before


@pytest.mark.parametrize(
    "name",
    [
        "run/checkpoint-5/stray.bin",
        "run/.ckptsync/checkpoint-5/files/n9/a.bin",
        "run/consolidated/checkpoint-5/model-9.safetensors",
    ],
)
def test_what_no_record_names_goes_when_it_is_old(name: str) -> None:
    store = MemoryStore()
    fill(store, "checkpoint-5")
    store.write(name, [b"x"])
    assert names(store, now=IDLE) == []
    assert swept(store) == [name]
    assert names(store) == []


def test_what_a_node_has_sent_and_never_named_goes_and_not_while_it_sends() -> None:
    store = MemoryStore()
    store.write("run/checkpoint-7/half.bin", [b"x"])
    assert names(store) == [], "nobody says that this is ours"
    store.write("run/.ckptsync/checkpoint-7/sending/n0", [b"sending\n"])
    assert names(store) == ["run/checkpoint-7/half.bin"], "its word is two days old"
    assert names(store, now=3.0 + IDLE) == ["run/checkpoint-7/half.bin"]
    late = list(find_orphans(store, LATER))
    assert [*delete_orphans(store, late, now=100.0)] == [], "it sends again by now"


@pytest.mark.parametrize("location", ["checkpoint-5", "checkpoint-5~other"])
def test_what_a_manifest_has_named_since_it_was_found_stays(location: str) -> None:
    store = MemoryStore()
    (said,) = read_manifests(store, [fill(store, "checkpoint-5", is_verified=False)]).values()
    store.write("run/checkpoint-5/late.bin", [b"x"])
    late = list(find_orphans(store, LATER))
    assert [one.entry.name for one in late] == ["run/checkpoint-5/late.bin"]
    # a node that came back, and found its bytes there
    put(store, replace(said, location=location, node="n1"))
    assert [*delete_orphans(store, late, LATER)] == []
    assert store.size("run/checkpoint-5/late.bin") == 1


def test_where_others_words_are_seen_late_they_are_waited_for_once() -> None:
    store, waited = MemoryStore(), []
    fill(store, "checkpoint-5")
    for name in ("stray.bin", "other.bin"):
        store.write(f"run/checkpoint-5/{name}", [b"x"])
    store.late = 3.0
    late = list(find_orphans(store, LATER))

    def others(seconds: float) -> None:
        waited.append(seconds)
        store.write("run/.ckptsync/checkpoint-5/sending/n0", [b"sending\n"])

    assert [*delete_orphans(store, late, 0.0, wait=others)] == []
    assert waited == [3.0]


def test_nothing_is_orphaned_where_a_record_of_its_name_cannot_be_read() -> None:
    store = MemoryStore()
    name = fill(store, "checkpoint-5")
    fill(store, "checkpoint-5~other")
    for location in ("checkpoint-5", "checkpoint-5~other"):
        store.write(f"run/{location}/stray.bin", [b"x"])
    store.write(name, [b"{}"])
    assert names(store) == []


def test_a_model_that_is_being_made_is_not_orphaned() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-5", is_verified=False)
    store.write("run/consolidated/checkpoint-5/model.safetensors", [b"x"])
    assert names(store) == []


def test_a_run_within_another_is_not_touched() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-5")
    fill(store, "checkpoint-1", run="run/checkpoint-5")
    assert names(store) == []


def test_where_a_manifest_is_gone_that_a_model_record_names_nothing_is_orphaned() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-5")
    store.delete(manifest_name(store, "checkpoint-5"))
    assert names(store) == []
