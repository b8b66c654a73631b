"""Finding what a user names, in a store on this machine or elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.downloader.find import PullRequest, check_outside, find, why_retired
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.tensors import Demands
from tests.support.filled_stores import flip, put
from tests.support.verified_stores import LOCATION, RUN, arrive, retire, verified, whole_store


def proven() -> MemoryStore:
    store = whole_store()
    put(store, verified(store))
    return store


@pytest.mark.parametrize("what", ["run", "run/latest", "run/checkpoint-4", "run/"])
def test_a_verified_checkpoint_is_found_by_every_name_it_has(what: str) -> None:
    found = find(proven(), PullRequest(what))
    assert (found.run, found.location, found.status, len(found.plan.files)) == (
        RUN,
        LOCATION,
        "VERIFIED",
        2,
    )
    assert next(
        f.name for f in find(proven(), PullRequest(what, is_model=True)).plan.files
    ).startswith("run/consolidated/")


def test_a_checkpoint_with_a_missing_file_is_given_only_with_unverified() -> None:
    store = proven()
    store.delete("run/checkpoint-4/config.json")
    with pytest.raises(
        Incomplete, match=r"config.json: missing in the store, or not as n0 uploaded it"
    ):
        find(store, PullRequest("run/checkpoint-4"))
    found = find(store, PullRequest("run/checkpoint-4", "any"))
    assert [f.under for f in found.plan.files] == ["model.safetensors"]
    assert found.plan.missing


def test_a_missing_file_of_a_damaged_checkpoint_is_damage() -> None:
    store = whole_store()
    store.delete("run/checkpoint-4/config.json")
    put(store, verified(store))
    with pytest.raises(Corrupt, match=r"config\.json"):
        find(store, PullRequest("run/checkpoint-4"))


def test_a_damaged_manifest_is_an_error() -> None:
    store = MemoryStore()
    name = arrive(store, {"a": b"1"}, demands=Demands())
    flip(store, name, 10)
    with pytest.raises(Corrupt, match="manifest-n0-0"):
        find(store, PullRequest("run/checkpoint-4"))
    store = proven()
    flip(store, put(store, Tombstone(RUN, LOCATION, LOCATION, 0, (), "old")), 10)
    with pytest.raises(Corrupt, match="tombstone-0"):
        find(store, PullRequest("run/checkpoint-4"))


def test_the_reason_of_a_deletion_can_be_read() -> None:
    store = proven()
    assert not why_retired(store, RUN, LOCATION)
    retire(store, "keep_last 3")
    assert why_retired(store, RUN, LOCATION) == "keep_last 3"
    assert why_retired(MemoryStore(), RUN, LOCATION) == "all its manifests were replaced or deleted"


@pytest.mark.parametrize("below", ["", "run", "x/y"])
def test_a_destination_inside_the_store_is_refused(tmp_path: Path, below: str) -> None:
    store = create_store(str(tmp_path / "store"))
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for root in ("store", "link"):
        with pytest.raises(CkptsyncError, match="inside the store"):
            check_outside(store, tmp_path / root / below)
    check_outside(store, tmp_path / "out")


def test_a_model_outlives_its_shards() -> None:
    store = proven()
    retire(store, "shards after 3", "shards", "begun")
    for path in ("model.safetensors", "config.json"):
        store.delete(f"{RUN}/{LOCATION}/{path}")
    with pytest.raises(Incomplete, match="shards after 3"):
        find(store, PullRequest("run/checkpoint-4"))
    assert len(find(store, PullRequest("run/latest", is_model=True)).plan.files) == 2
    store.delete("run/consolidated/checkpoint-4/config.json")
    with pytest.raises(Incomplete, match="not all of its files are in the store"):
        find(store, PullRequest("run/checkpoint-4", "any", is_model=True))


def test_a_mistyped_run_gets_a_similar_name_as_hint() -> None:
    with pytest.raises(ConfigError, match="run 'runn' not found") as caught:
        find(proven(), PullRequest("runn"))
    assert "did you mean 'run'?" in caught.value.hint
