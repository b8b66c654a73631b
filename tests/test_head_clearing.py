"""What goes, in which order, and what a hostile or unlucky name must not take with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckptsync.errors import ConfigError, Incomplete
from ckptsync.head.clearing import check_alone, clear, files, forget
from ckptsync.head.metrics import read_manifests
from ckptsync.records.manifest import Manifest
from ckptsync.stores.contract import Entry
from ckptsync.stores.memory import MemoryStore
from tests.retained import fill, put


class Listed(MemoryStore):
    """That remembers what was listed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def names(self, prefix: str) -> Iterator[Entry]:
        self.asked.append(prefix)
        return super().names(prefix)


def gone(store: MemoryStore, run: str = "run", location: str = "checkpoint-1") -> list[int]:
    sizes: list[int] = []
    clear(store, run, location, "location", sizes.append, sure=lambda: None)
    return sizes


def manifests(store: MemoryStore) -> dict[str, Manifest]:
    names = [e.name for e in store.names("") if "/manifest-" in e.name]
    return {name: read_manifests(store, [name])[0] for name in names}


def test_what_opens_it_goes_first_and_the_neighbours_stay() -> None:
    store = MemoryStore()
    for location in ("checkpoint-1", "checkpoint-10", "checkpoint-1~other"):
        fill(store, location)
    order = [e.name.removeprefix("run/") for e in files(store, "run", "checkpoint-1", "location")]
    assert order == [
        "checkpoint-1/trainer_state.json",
        "checkpoint-1/a.bin",
        "checkpoint-1/b.bin",
        "consolidated/checkpoint-1/model.safetensors",
    ]
    assert len(gone(store)) == 4
    assert forget(store, "run", "checkpoint-1", manifests(store))
    assert {e.name.split("/")[-2] for e in store.names("run/")} == {"checkpoint-10", "checkpoint-1~other"}


def test_whether_it_may_still_go_is_asked_once_when_all_is_listed_and_nothing_has_gone() -> None:
    store = Listed()
    fill(store, "checkpoint-1")
    before = [*store.names("run/")]

    def sure() -> None:
        assert [*store.names("run/")] == before
        store.asked.append("sure")
        raise Incomplete("too late")

    store.asked.clear()
    with pytest.raises(Incomplete, match="too late"):
        clear(store, "run", "checkpoint-1", "location", lambda _: None, sure=sure)
    assert store.asked[-1] == "sure"
    assert "run/consolidated/checkpoint-1/" in store.asked
    assert [*store.names("run/")] == before
    asked: list[str] = []
    clear(store, "run", "checkpoint-1", "location", lambda _: None, sure=lambda: asked.append("sure"))
    assert asked == ["sure"]


def test_records_stay_while_there_are_files() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1")
    before = [*store.names("")]
    assert not forget(store, "run", "checkpoint-1", manifests(store))
    assert [*store.names("")] == before


def test_a_node_that_sends_another_save_of_that_name_is_still_heard() -> None:
    store = MemoryStore()
    fill(store, "checkpoint-1")
    store.write("run/.ckptsync/checkpoint-1/sending/n9", [b"sending\n"])
    gone(store)
    forget(store, "run", "checkpoint-1", manifests(store))
    assert [e.name for e in store.names("")] == ["run/.ckptsync/checkpoint-1/sending/n9"]


def test_what_a_manifest_had_taken_back_does_not_come_alive_again() -> None:
    store = MemoryStore()
    old = fill(store, "checkpoint-1~old", is_verified=False)
    (said,) = manifests(store).values()
    put(store, replace(said, location="checkpoint-1", supersedes=(old,)))
    assert forget(store, "run", "checkpoint-1", manifests(store))
    assert manifests(store) == {}


@pytest.mark.parametrize(
    ("run", "location", "another"),
    [
        ("run", "checkpoint-1", ("run/checkpoint-1", "checkpoint-7")),
        ("run/checkpoint-1", "checkpoint-7", ("run", "checkpoint-1")),
        ("run", "checkpoint-1", ("run/consolidated", "checkpoint-1")),
        ("run/consolidated", "checkpoint-1", ("run", "checkpoint-1")),
        ("run", "checkpoint-1", ("run/consolidated/checkpoint-1", "x-1")),
    ],
)
def test_runs_that_lie_in_each_other_are_left_alone(run: str, location: str, another: tuple[str, str]) -> None:
    store = MemoryStore()
    fill(store, location, run=run)
    fill(store, another[1], run=another[0])
    before = [*store.names("")]
    with pytest.raises(ConfigError, match=r"another run|the store itself|would go"):
        gone(store, run, location)
    assert [*store.names("")] == before


@pytest.mark.parametrize("location", ["consolidated", ".ckptsync"])
def test_a_location_with_a_name_of_the_stores_own_is_never_removed(location: str) -> None:
    with pytest.raises(ConfigError, match="the store itself uses"):
        check_alone(MemoryStore(), "run", location)
