"""From what a user names to an order, in a store on this machine or elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete
from ckptsync.model import Demands
from ckptsync.pull.ordering import Asked, check_apart, inside, ordered, retired
from ckptsync.records.tombstone import Tombstone
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.stores.trees import Access
from tests.verified import PLACE, RUN, arrive, flip, place, put, verified, whole_store
from tests.weed import weed


def proven() -> MemoryStore:
    store = whole_store()
    put(store, verified(store))
    return store


@pytest.mark.parametrize("what", ["run", "run/latest", "run/checkpoint-4", "run/"])
def test_a_verified_checkpoint_is_found_by_every_name_it_has(what: str) -> None:
    found = ordered(proven(), Asked(what))
    assert (found.run, found.place, found.word, len(found.order.files)) == (RUN, PLACE, "VERIFIED", 2)
    assert next(f.name for f in ordered(proven(), Asked(what, is_model=True)).order.files).startswith("run/consolidated/")


def test_what_is_not_there_is_not_ordered() -> None:
    store = proven()
    store.delete("run/checkpoint-4/config.json")
    with pytest.raises(Incomplete, match=r"config.json: not in the store as n0 has sent it"):
        ordered(store, Asked("run/checkpoint-4"))
    found = ordered(store, Asked("run/checkpoint-4", "any"))
    assert [f.under for f in found.order.files] == ["model.safetensors"]
    assert found.order.lacking


def test_of_what_is_known_to_be_damaged_the_missing_is_damage() -> None:
    store = whole_store()
    store.delete("run/checkpoint-4/config.json")
    put(store, verified(store))
    with pytest.raises(Corrupt, match=r"config\.json"):
        ordered(store, Asked("run/checkpoint-4"))


def test_a_damaged_manifest_is_told_and_not_passed_over() -> None:
    store = MemoryStore()
    name = arrive(store, {"a": b"1"}, demands=Demands())
    flip(store, name, 10)
    with pytest.raises(Corrupt):
        ordered(store, Asked("run/checkpoint-4"))


def test_why_files_go_away_can_be_asked() -> None:
    store = proven()
    assert not retired(store, RUN, PLACE)
    put(store, Tombstone(RUN, PLACE, PLACE, 0, tuple(k.name for k in place(store).manifests), "keep_last 3"))
    assert retired(store, RUN, PLACE) == "keep_last 3"
    assert retired(MemoryStore(), RUN, PLACE) == "no manifest of it counts any more"


def test_a_place_names_its_store_too(tmp_path: Path) -> None:
    bucket = f"s3://{weed().bucket()}/deep"
    for url, options in ((str(tmp_path), {}), (bucket, weed().options())):
        create_store(url, options)
        access = Access(options)
        for below, what in (
            ("run", "run"),
            ("a/b/checkpoint-4", "a/b/checkpoint-4"),
            ("run/consolidated/checkpoint-4", "run/checkpoint-4"),
        ):
            store, found = inside(f"{url}/{below}", access)
            assert (store.url.rstrip("/"), found) == (url, what)
        with pytest.raises(ConfigError, match="no run in it"):
            inside(url, access)


def test_what_is_in_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in no store"):
        inside(str(tmp_path / "run"), Access())


@pytest.mark.parametrize("below", ["", "run", "x/y"])
def test_nothing_lands_in_the_store_itself(tmp_path: Path, below: str) -> None:
    store = create_store(str(tmp_path / "store"))
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for root in ("store", "link"):
        with pytest.raises(CkptsyncError, match="inside the store"):
            check_apart(store, tmp_path / root / below)
    check_apart(store, tmp_path / "out")


def test_a_model_outlives_its_shards() -> None:
    store = proven()
    put(
        store,
        Tombstone(
            RUN, PLACE, PLACE, 0, tuple(k.name for k in place(store).manifests), "shards after 3", "shards", "begun", format=2
        ),
    )
    for path in ("model.safetensors", "config.json"):
        store.delete(f"{RUN}/{PLACE}/{path}")
    with pytest.raises(Incomplete, match="shards after 3"):
        ordered(store, Asked("run/checkpoint-4"))
    assert len(ordered(store, Asked("run/latest", is_model=True)).order.files) == 2
