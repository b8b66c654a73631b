"""Sending one take: each byte read once where that is enough, several files at once, and whoever else is at it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Exists, StoreError, Unsupported
from ckptsync.layouts.rank_names import rank
from ckptsync.records import coding
from ckptsync.records.names import OURS
from ckptsync.scan import found, spots
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.plan import draft
from ckptsync.worker.saving import told
from ckptsync.worker.snapshot import Hold, Seen, hold, take
from ckptsync.worker.store_view import RunRecords, read_records
from ckptsync.worker.upload import SMALL, Destination, Sent, upload
from tests.test_worker_push import ONE, kept, lay, manifests


def on_the_way(tmp_path: Path, store: MemoryStore, at: float = 0.0) -> tuple[Hold, Seen, Destination]:
    lay(tmp_path, ONE, at)
    (spot,) = spots(tmp_path)
    held = hold(found(spot), None, spot.family, spot.name)
    road = Destination(store, "n0", lambda: read_records(store, "run", RunRecords()).manifests("checkpoint-4"))
    return held, Seen("run", spot, held, None), road


def test_sending_twice_is_sending_once(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    first, second = upload(planned, held, road), upload(planned, held, road)
    assert (first.files, first.size) == (len(ONE), sum(map(len, ONE.values())))
    assert (second.location, second.files) == (first.location, 0)


def test_of_manifests_that_are_gone_only_those_of_its_own_location_are_taken_back(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    gone = [
        f"run/.ckptsync/{location}/manifest-n0-0-0123456789abcdef.json" for location in ("checkpoint-4", "checkpoint-4~aaaaaaaa")
    ]
    upload(replace(draft(told(seen, "n0"), take(held)), supersedes=tuple(gone)), held, road)
    assert [k.manifest.supersedes for k in manifests(store)] == [(gone[0],)]


def test_the_same_bytes_of_another_save_are_sent_to_its_own_location(tmp_path: Path) -> None:
    store = MemoryStore()
    locations = []
    for n, save in enumerate(("a" * 16, "a" * 16, "b" * 16)):
        held, seen, road = on_the_way(tmp_path, store, 100.0 * n)
        planned = replace(draft(told(seen, "n0"), take(held)), save=save)
        locations.append((sent := upload(planned, held, road)).location)
    assert locations == ["checkpoint-4", "checkpoint-4", "checkpoint-4~bbbbbbbb"]
    assert sent.files == len(ONE)


def taken(tmp_path: Path, store: Store, files: dict[str, bytes], node: str = "n0", save: str = "") -> Callable[[], Sent]:
    """Sending these files, each time as if for the first time in this process."""
    lay(tmp_path, files)
    (spot,) = spots(tmp_path)
    held = hold(found(spot), None, spot.family, spot.name)
    road = Destination(store, node, lambda: read_records(store, "run", RunRecords()).manifests("checkpoint-4"), threads=4)
    return lambda: upload(replace(draft(told(Seen("run", spot, held, None), node), take(held)), save=save), held, road)


class Comparing(MemoryStore):
    """A store that can tell whether a name has the bytes that it is offered: nobody needs to read them back."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        if any(e.name == name for e in self.names("")):
            raise Exists(f"{name}: already there", is_same=self._content(name) == data)
        super().create(name, [data], about)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.read |= {name} if OURS not in name else set()
        super().read_into(name, start, out)


def test_what_a_killed_try_has_finished_is_neither_sent_nor_read_back_where_the_store_can_compare(tmp_path: Path) -> None:
    store = Comparing()
    for path in ("m/meta.txt", "x"):
        store.write(f"run/checkpoint-4/{path}", [ONE[path]])
    times = {e.name: e.mtime for e in store.names("")}
    sent = taken(tmp_path, store, ONE)()
    assert (sent.files, store.read) == (len(ONE) - 2, set())
    assert times.items() <= {e.name: e.mtime for e in store.names("")}.items()
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_what_another_manifest_vouches_for_is_neither_sent_nor_read_back(tmp_path: Path) -> None:
    store = Comparing()
    taken(tmp_path, store, ONE)()
    times = {e.name: e.mtime for e in store.names("run/checkpoint-4/")}
    assert taken(tmp_path, store, ONE, "n1", save="a")().files == 0
    assert (store.read, {e.name: e.mtime for e in store.names("run/checkpoint-4/")}) == (set(), times)
    own = {path: data for path, data in ONE.items() if rank(path) is None}  # the very same file of a rank is the other node's
    assert kept(store) == {"checkpoint-4": {"n0": ONE, "n1": own}}


def test_a_copy_of_what_another_node_has_stored_is_not_said_again(tmp_path: Path) -> None:
    store = MemoryStore()
    taken(tmp_path, store, ONE, save="a")()
    names = [e.name for e in store.names("")]
    found = taken(tmp_path, store, ONE, "n1")()
    assert (found.files, found.held is not None and found.held.node) == (0, "n0")
    assert [e.name for e in store.names("") if "sending" not in e.name] == [n for n in names if "sending" not in n]


def test_what_is_copied_to_a_node_that_has_said_its_part_is_not_said_again(tmp_path: Path) -> None:
    store = MemoryStore()
    part = {"x": ONE["x"]}
    for n, files in enumerate((ONE, part)):
        assert taken(tmp_path / str(n), store, files, f"n{n}", save="a")().held is None
    copied = taken(tmp_path / "1", store, ONE, "n1", save="a")()
    assert copied.held is not None
    assert kept(store) == {"checkpoint-4": {"n0": ONE, "n1": part}}


def test_litter_that_the_store_has_compared_is_replaced(tmp_path: Path) -> None:
    store = Comparing()
    store.write("run/checkpoint-4/x", [b"Z"])
    assert taken(tmp_path, store, ONE)().files == len(ONE)
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


class Watched(MemoryStore):
    """Says what was begun and ended, in order; with a barrier, nothing ends before so many have begun."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        super().__init__()
        self.said: list[str] = []
        self._meeting = meeting

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        is_file = OURS not in name
        self.said += [f"begin {name}"] * is_file
        if self._meeting and is_file:
            self._meeting.wait()
        super().create(name, chunks, about)
        self.said += [f"end {name}"] * is_file


def test_small_files_are_many_at_once(tmp_path: Path) -> None:
    store = Watched(threading.Barrier(16, timeout=20))
    taken(tmp_path, store, {f"{n:02}": b"small" for n in range(48)})()
    assert len(kept(store)["checkpoint-4"]["n0"]) == 48


def test_what_says_what_the_shards_are_is_there_before_the_first_shard_is_begun(tmp_path: Path) -> None:
    store = Watched()
    taken(tmp_path, store, ONE | {f"shard{n}": bytes(SMALL + 1) for n in range(3)})()
    shards = [line for line in store.said if "shard" in line]
    assert store.said[-len(shards) :] == shards


def test_a_write_says_how_much_and_from_where(tmp_path: Path) -> None:
    abouts: dict[str, About] = {}

    class Telling(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            abouts[name] = about
            super().create(name, chunks, about)

    taken(tmp_path, Telling(), ONE)()
    first = dict(abouts)
    assert {name.removeprefix("run/checkpoint-4/"): about.size for name, about in first.items() if OURS not in name} == {
        path: len(content) for path, content in ONE.items()
    }
    taken(tmp_path, Telling(), ONE)()
    assert abouts == first
    abouts.clear()
    taken(tmp_path, Telling(), ONE, "n1")()
    assert not {about.origin for about in first.values()} & {about.origin for about in abouts.values()}, (
        "nobody else goes on with it"
    )


def test_an_error_of_one_file_is_the_error_and_commits_nothing(tmp_path: Path) -> None:
    class Full(MemoryStore):
        def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            if name.endswith("/x"):
                raise StoreError(f"{name}: no space left")
            super().create(name, chunks, about)

    store = Full()
    with pytest.raises(StoreError, match="no space left"):
        taken(tmp_path, store, ONE)()
    assert manifests(store) == []


def test_more_files_than_a_manifest_can_name_are_refused_before_one_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    monkeypatch.setitem(coding.LIMITS, "manifest", 100 * len(planned.files))
    with pytest.raises(Unsupported, match="its manifest would have"):
        upload(planned, held, road)
    assert list(store.names("")) == []


def test_a_file_of_a_time_that_no_record_can_say_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, road = on_the_way(tmp_path, store)
    planned = draft(told(seen, "n0"), take(held))
    late = replace(planned, files=tuple(replace(f, mtime=2**63) for f in planned.files))
    with pytest.raises(Unsupported, match="its time is after the year 2262"):
        upload(late, held, road)
    assert list(store.names("")) == []
