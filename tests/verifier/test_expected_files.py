"""What should be there, from manifests and the model record."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ckptsync.digest import FileDigest, digest_stream
from ckptsync.errors import Corrupt, Unsupported
from ckptsync.records.store_paths import consolidated_prefix, file_name
from ckptsync.stores.memory import MemoryStore
from ckptsync.verifier.expected_files import (
    check_sizes,
    decode_baseline,
    directory_file,
    encode_baseline,
    expected_files,
    note_gaps,
)
from tests.support.verified_stores import LOCATION, RUN, WHOLE, arrive, location, whole_store

SHARD = {"pytorch_model_fsdp_0/__0_0.distcp": b"x" * 100}


def test_files_of_manifests_and_of_the_model_record_are_expected_where_they_lie() -> None:
    found = expected_files(location(whole_store()))
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
    copies = [f for f in expected_files(location(store)) if f.is_copy]
    assert [(f.path, f.shown, f.size) for f in copies] == [
        ("notes.txt", ".ckptsync/checkpoint-4/files/n1/notes.txt", 5)
    ]


def test_stat_tells_what_is_not_there_and_what_has_another_size() -> None:
    store = whole_store()
    store.delete(file_name(RUN, LOCATION, "config.json"))
    store.write(file_name(RUN, LOCATION, "model.safetensors"), [b"short"])
    store.write(consolidated_prefix(RUN, LOCATION) + "config.json", [bytes(99)])
    seen = location(store)
    found = list(check_sizes(expected_files(seen), seen.sizes))
    assert [(f.kind, f.name) for f in found] == [
        ("missing", "checkpoint-4/config.json"),
        ("size", "checkpoint-4/model.safetensors"),
        ("size", "consolidated/checkpoint-4/config.json"),
    ]
    assert [f.ranges for f in found[1:]] == [((5, len(WHOLE["model.safetensors"])),), ()]


def test_what_no_node_has_sent_is_a_note() -> None:
    store = MemoryStore()
    arrive(store, SHARD)
    (note,) = note_gaps(location(store))
    assert (note.kind, note.name) == ("note", LOCATION)
    assert list(note_gaps(location(whole_store()))) == []


# --- baselines

FILES = [
    directory_file(name, digest_stream([data], len(data)))
    for name, data in {"b/c": b"x" * 10_000, "a": b""}.items()
]


def test_what_is_written_is_read_again_in_the_order_of_names() -> None:
    assert decode_baseline(encode_baseline(FILES), "base") == tuple(
        sorted(FILES, key=lambda f: f.path)
    )
    assert encode_baseline(FILES) == encode_baseline(FILES[::-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"format": 1}',
        b'{"format": "1", "files": [], "digest": ""}',
        b'{"format":1,"files":[],"digest":"\xff"}',
        b"[" * 100_000,
    ],
)
def test_what_is_none_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="base: not a baseline"):
        decode_baseline(data, "base")


def test_a_digest_that_was_changed_is_seen() -> None:
    told = json.loads(encode_baseline(FILES))
    told["files"][0]["size"] += 1
    with pytest.raises(Corrupt, match="do not match its checksum"):
        decode_baseline(json.dumps(told).encode(), "base")


@pytest.mark.parametrize(
    "recorded",
    [
        replace(FILES[0].recorded, block_size=0),
        replace(FILES[0].recorded, blocks=()),
        replace(FILES[0].recorded, digest="x"),
    ],
)
def test_a_file_that_cannot_be_is_corrupt(recorded: FileDigest) -> None:
    with pytest.raises(Corrupt, match=r"^base: "):
        decode_baseline(encode_baseline([directory_file("f", recorded)]), "base")


def test_a_path_that_leads_elsewhere_is_refused() -> None:
    with pytest.raises(Corrupt):
        decode_baseline(encode_baseline([directory_file("../x", FILES[0].recorded)]), "base")


def test_a_newer_one_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="baseline format 2"):
        decode_baseline(encode_baseline(FILES).replace(b'"format": 1', b'"format": 2'), "base")
