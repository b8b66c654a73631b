"""Copies within the store are proven before they get their name; the rest is with the command (tests/cli/test_repair.py)."""

from __future__ import annotations

import pytest

from ckptsync.catalogue.fresh import fresh
from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.head import keeping, tombs
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.gc import Asked, tick
from ckptsync.head.mending import PIECE, Copied, ground, mend
from ckptsync.head.metrics import read_manifests
from ckptsync.head.repairing import plan
from ckptsync.head.rules import Rules
from ckptsync.head.tombs import Grave
from ckptsync.records.tombstone import Scope, Stage
from ckptsync.stores.memory import MemoryStore
from tests.filled import flip, read
from tests.retained import FIRST, fill

LAST = Asked(lambda _: Rules(keep_last=1), 0.0)
LOCATION = "checkpoint-1"


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1])
def test_a_copy_is_what_was_wanted(size: int) -> None:
    store, content = MemoryStore(), b"x" * size
    store.write("a", [content])
    store.write("b", Copied(store, "a", size, digest(content)))
    assert read(store, "b") == content


def test_other_bytes_never_appear() -> None:
    store = MemoryStore()
    store.write("a", [b"other"])
    with pytest.raises(Corrupt, match="not the bytes that are wanted"):
        store.write("b", Copied(store, "a", 5, digest(b"right")))
    assert [e.name for e in store.names("")] == ["a"]


def filled() -> tuple[MemoryStore, str]:
    store = MemoryStore()
    name = fill(store, LOCATION)
    fill(store, "checkpoint-2", FIRST + 3600)
    return store, name


def stone(store: MemoryStore, manifest: str, stage: Stage, scope: Scope = "location") -> str:
    return tombs.write(store, Grave({manifest: read_manifests(store, [manifest])[0]}, scope, "old"), stage)


def mended(store: MemoryStore) -> tuple[str, ...]:
    found = fresh(store, "run")
    seen = next((s for s in found.readable if s.location == LOCATION), None)
    return mend(store, plan("run", LOCATION, seen, (), ground(found, LOCATION, {})), seen, HeadOptions())


def words(store: MemoryStore, kind: str) -> list[str]:
    return [e.name for e in store.names(f"run/.ckptsync/{LOCATION}/") if f"/{kind}-" in e.name]


def swept(store: MemoryStore) -> bool:
    """Whether two ticks of gc have left something of the location."""
    for _ in range(2):
        tick(store, LAST)
    return bool([*store.names(f"run/{LOCATION}/")])


def test_what_a_damaged_word_kept_is_kept_by_a_new_one() -> None:
    store, _ = filled()
    keeping.keep(store, "run", LOCATION, "the paper")
    (bad,) = words(store, "keep")
    flip(store, bad)
    assert len(mended(store)) == 2
    assert bad not in words(store, "keep")
    assert swept(store)
    assert keeping.release(store, "run", LOCATION)
    assert not swept(store)


def test_a_damaged_word_to_keep_that_was_released_later_keeps_nothing() -> None:
    store, _ = filled()
    keeping.keep(store, "run", LOCATION)
    (bad,) = words(store, "keep")
    keeping.release(store, "run", LOCATION)
    flip(store, bad)
    assert len(mended(store)) == 1
    assert not swept(store)


@pytest.mark.parametrize("before", [("said",), ("said", "begun")])
def test_what_a_damaged_tombstone_had_taken_back_stays_taken_back(before: tuple[Stage, ...]) -> None:
    store, manifest = filled()
    for stage in before:
        stone(store, manifest, stage)
    bad = stone(store, manifest, "back")
    flip(store, bad)
    done = mended(store)
    assert len(done) == 2
    assert bad not in words(store, "tombstone")
    assert not fresh(store).locations[0].conditions.retired, "gc decides anew, and its grace begins anew"


def test_what_has_gone_in_part_is_not_taken_back() -> None:
    store, manifest = filled()
    stone(store, manifest, "said")
    stone(store, manifest, "begun")
    flip(store, stone(store, manifest, "begun"))
    store.delete(f"run/{LOCATION}/a.bin")
    assert len(mended(store)) == 1
    assert not swept(store)


def test_a_damaged_tombstone_stays_while_no_manifest_says_what_it_is_of() -> None:
    store, manifest = filled()
    stone(store, manifest, "said")
    flip(store, stone(store, manifest, "back"))
    flip(store, manifest)
    with pytest.raises(Incomplete, match="manifest cannot be read"):
        mended(store)
    assert len(words(store, "tombstone")) == 2


def test_a_damaged_report_goes_when_a_later_one_says_what_is() -> None:
    store, _ = filled()
    (good,) = words(store, "report")
    bad = good.replace("report-1-", "report-0-")
    store.write(bad, [b"x"])
    assert mended(store) == (bad.removeprefix("run/"),)
    assert words(store, "report") == [good]
    flip(store, good)
    assert mended(store) == (), "the next verification says what is"
