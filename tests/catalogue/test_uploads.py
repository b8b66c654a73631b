"""What a catalogue says of checkpoints that nodes are uploading."""

from __future__ import annotations

import pytest

from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.records.store_paths import SENDING, senders
from ckptsync.stores.contract import Entry
from ckptsync.stores.contract import read_all as content
from ckptsync.stores.memory import MemoryStore
from tests.support.filled_stores import DEMO, contents, send, two_nodes

FSDP2 = DEMO / "fsdp2" / "node0" / "checkpoint-4"


def announce(store: MemoryStore, node: str = "n1", checkpoint: str = "checkpoint-4") -> float:
    """Say in a store that a node is sending files; the time on the store's clock."""
    name = f"run/.ckptsync/{checkpoint}/sending/{node}"
    store.write(name, [b"sending\n"])
    return next(e.mtime for e in store.names(name.rpartition("/")[0] + "/") if e.name == name)


def test_a_checkpoint_is_uploading_while_a_node_says_so_and_incomplete_when_it_has_stopped() -> (
    None
):
    store, cache = MemoryStore(), Cache()
    send(store, FSDP2, "n0")
    assert [s.status for s in read_catalogue(store, cache, now=0.0).summaries] == ["INCOMPLETE"]
    now = announce(store)
    (seen,) = read_catalogue(store, cache, now=now).summaries
    assert (seen.status, seen.uploading) == ("UPLOADING", ("n1",))
    assert seen.missing_lines, "nothing says what is missing"
    (seen,) = read_catalogue(store, cache, now=now + SENDING).summaries
    assert (seen.status, seen.uploading, seen.percent) == ("INCOMPLETE", (), None)
    store.write("run/.ckptsync/checkpoint-4/sending/n1", [b""])
    assert [s.status for s in read_catalogue(store, cache, now=now).summaries] == ["INCOMPLETE"]


def test_the_percentage_grows_with_the_files_that_come_though_no_record_names_them_yet() -> None:
    store, whole, cache = MemoryStore(), MemoryStore(), Cache()
    send(store, FSDP2, "n0")
    two_nodes(whole)
    now = announce(store)
    seen = [s.percent for s in read_catalogue(store, cache, now=now).summaries]
    for name in sorted(contents(whole).keys() - contents(store).keys()):
        if "/.ckptsync/" not in name:
            store.write(name, [content(whole, name)])
            seen += [s.percent for s in read_catalogue(store, cache, now=now).summaries]
    assert seen == sorted(seen, key=lambda p: p or 0)
    assert seen[0] is not None
    assert 0 < seen[0] < 100 == seen[-1]


def test_a_checkpoint_without_a_manifest_is_shown_and_nothing_is_decided_about_it() -> None:
    store = MemoryStore()
    two_nodes(store)
    now = announce(store, "n0", "checkpoint-10")
    store.write("run/checkpoint-10/a.bin", [bytes(100)])
    found = read_catalogue(store, now=now)
    assert [s.location for s in found.summaries] == ["checkpoint-4"]
    assert [
        (s.location, s.status, s.files, s.size, s.uploading, s.percent) for s in found.begun
    ] == [("checkpoint-10", "UPLOADING", 1, 100, ("n0",), None)]
    assert [s.location for s in found.shown] == ["checkpoint-4", "checkpoint-10"]
    assert read_catalogue(store, now=now + SENDING).begun == ()


def test_a_complete_checkpoint_stays_so_while_a_node_adds_to_it() -> None:
    store = MemoryStore()
    two_nodes(store)
    found = read_catalogue(store, now=announce(store))
    assert [s.status for s in found.shown] == ["COMPLETE"]


@pytest.mark.parametrize(
    ("name", "size", "age", "is_one"),
    [
        ("run/.ckptsync/checkpoint-4/sending/n0", 8, 0, True),
        ("a/run/.ckptsync/checkpoint-4/sending/n0", 8, SENDING - 1, True),
        ("run/.ckptsync/checkpoint-4/sending/n0", 8, SENDING, False),
        ("run/.ckptsync/checkpoint-4/sending/n0", 0, 0, False),
        ("run/checkpoint-4/sending/n0", 8, 0, False),
        ("run/.ckptsync/checkpoint-4/files/n0/sending/x", 8, 0, False),
        ("run/.ckptsync/checkpoint-4/manifest-n0-0-0123456789abcdef.json", 8, 0, False),
    ],
)
def test_a_node_sends_while_its_announcement_is_young_and_not_empty(
    name: str, size: int, age: float, *, is_one: bool
) -> None:
    found = senders([Entry(name, size, 5000.0 - age)], 5000.0)
    assert found == (
        {(name.partition("/.ckptsync/")[0], "checkpoint-4"): {"n0": 5000.0 - age}} if is_one else {}
    )
