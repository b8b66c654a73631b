"""An upload: each byte read once, several files at once, never two saves in one place, whoever else
is at it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import ckptsync.worker
from ckptsync.checkpoint_dirs import find_checkpoint_dirs, list_checkpoint
from ckptsync.digest import Digester, block_size
from ckptsync.errors import Exists, Incomplete, StoreError, Unsupported
from ckptsync.layouts.file_names import rank
from ckptsync.records import io
from ckptsync.records.manifest import FileEntry
from ckptsync.records.store_paths import SENDING
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker import upload as upload_module
from ckptsync.worker.local_save import (
    AfterChunk,
    LocalFiles,
    LocalSave,
    build_local_save,
    ignore_chunk,
)
from ckptsync.worker.store_view import RunRecords, read_run
from ckptsync.worker.upload import (
    SMALL_FILE,
    FileSender,
    Sent,
    UploadContext,
    correct_location,
    upload,
)
from tests.support.exhaustive import sampled
from tests.support.filled_stores import put
from tests.support.interleaving import raced
from tests.support.worker_in_process import (
    ONE,
    TWO,
    Interrupted,
    Overtaken,
    context,
    draft_of,
    kept,
    lay,
    manifests,
    push_now,
)


def on_the_way(
    tmp_path: Path, store: MemoryStore, at: float = 0.0
) -> tuple[LocalFiles, LocalSave, UploadContext]:
    lay(tmp_path, ONE, at)
    (checkpoint_dir,) = find_checkpoint_dirs(tmp_path)
    local_files = build_local_save("run", checkpoint_dir, list_checkpoint(checkpoint_dir)).files
    to = context(store)
    return local_files, LocalSave("run", checkpoint_dir, local_files, None), to


def test_only_lost_manifests_of_its_own_location_are_taken_back(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, to = on_the_way(tmp_path, store)
    name = "manifest-n0-0-0123456789abcdef.json"
    gone = [f"run/.ckptsync/checkpoint-4{suffix}/{name}" for suffix in ("", "~aaaaaaaa")]
    upload(replace(draft_of(seen), supersedes=tuple(gone)), held, to)
    assert [k.manifest.supersedes for k in manifests(store)] == [(gone[0],)]


def test_the_same_bytes_of_another_save_are_sent_to_its_own_location(tmp_path: Path) -> None:
    store = MemoryStore()
    locations = []
    for n, save in enumerate(("a" * 16, "a" * 16, "b" * 16)):
        held, seen, to = on_the_way(tmp_path, store, 100.0 * n)
        draft = replace(draft_of(seen), save=save)
        locations.append((sent := upload(draft, held, to)).location)
    assert locations == ["checkpoint-4", "checkpoint-4", "checkpoint-4~bbbbbbbb"]
    assert sent.files == len(ONE)


def test_a_save_that_another_node_keeps_moving_waits_in_the_end(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, to = on_the_way(tmp_path, store)
    draft = replace(draft_of(seen), save="a" * 16)
    numbers = itertools.count()
    before: list[str] = []

    def move(_: int = 0) -> None:
        """Have the other node move its part of the save to a further location."""
        digester = Digester(1, block_size(1, 1))
        digester.update(b"1")
        content = digester.result()
        recorded = (content.size, content.digest, content.block_size, content.blocks)
        other_part = FileEntry("m/__1_0.distcp", *recorded, draft.started)
        location = f"checkpoint-4~{next(numbers):08x}"
        part = replace(draft, node="n1", location=location, files=(other_part,), ranks=(1,))
        manifest = replace(part, supersedes=tuple(before))
        before[:] = [io.create_record(store, manifest)[0]]

    move()
    with pytest.raises(Incomplete, match="other nodes kept moving the save"):
        upload(draft, held, replace(to, after_chunk=move))
    names = [e.name for e in store.names("") if RECORDS not in e.name]
    assert len({name.split("/")[1] for name in names}) == upload_module.ROUNDS


def taken(
    tmp_path: Path, store: Store, files: dict[str, bytes], node: str = "n0", save: str = ""
) -> Callable[[], Sent]:
    """Sending these files, each time as if for the first time in this process."""
    lay(tmp_path, files)
    (checkpoint_dir,) = find_checkpoint_dirs(tmp_path)
    local_files = build_local_save("run", checkpoint_dir, list_checkpoint(checkpoint_dir)).files
    to = context(store, node)
    return lambda: upload(
        replace(draft_of(LocalSave("run", checkpoint_dir, local_files, None), node), save=save),
        local_files,
        to,
    )


class Comparing(MemoryStore):
    """A store that can tell whether a name has the bytes that it is offered: nobody needs to read
    them back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        if any(e.name == name for e in self.names("")):
            raise Exists(f"{name}: already there", is_same=self._content(name) == data)
        super().create(name, [data], about)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.read |= {name} if RECORDS not in name else set()
        super().read_into(name, start, out)


def test_a_killed_try_s_bytes_are_used_where_the_store_compares(tmp_path: Path) -> None:
    store = Comparing()
    for path, content in (("m/meta.txt", ONE["m/meta.txt"]), ("x", ONE["x"]), ("empty", b"Z")):
        store.write(f"run/checkpoint-4/{path}", [content])
    times = {e.name: e.mtime for e in store.names("") if not e.name.endswith("empty")}
    sent = taken(tmp_path, store, ONE)()
    assert (sent.files, store.read) == (len(ONE) - 2, set())
    assert times.items() <= {e.name: e.mtime for e in store.names("")}.items()
    assert kept(store) == {"checkpoint-4": {"n0": ONE}}


def test_what_another_manifest_vouches_for_is_neither_sent_nor_read_back(tmp_path: Path) -> None:
    store = Comparing()
    taken(tmp_path, store, ONE)()
    times = {e.name: e.mtime for e in store.names("run/checkpoint-4/")}
    assert taken(tmp_path, store, ONE, "n1", save="a")().files == 0
    assert store.read == set()
    assert {e.name: e.mtime for e in store.names("run/checkpoint-4/")} == times
    # the very same file of a rank is the other node's
    own = {path: data for path, data in ONE.items() if rank(path) is None}
    assert kept(store) == {"checkpoint-4": {"n0": ONE, "n1": own}}


def test_what_a_manifest_vouches_for_and_was_cut_short_is_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    taken(tmp_path, store, ONE)()
    store.write("run/checkpoint-4/x", [b""])
    assert taken(tmp_path, store, ONE, "n1", save="a")().files == 1
    assert kept(store)["checkpoint-4"]["n0"] == ONE


class Watched(MemoryStore):
    """Says what was begun and ended, in order.

    With a barrier, nothing ends before so many have begun.
    """

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        super().__init__()
        self.said: list[str] = []
        self._meeting = meeting

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        is_file = RECORDS not in name
        self.said += [f"begin {name}"] * is_file
        if self._meeting and is_file:
            self._meeting.wait()
        super().create(name, chunks, about)
        self.said += [f"end {name}"] * is_file


def test_small_files_are_many_at_once(tmp_path: Path) -> None:
    store = Watched(threading.Barrier(16, timeout=60))
    taken(tmp_path, store, {f"{n:02}": b"small" for n in range(48)})()
    assert len(kept(store)["checkpoint-4"]["n0"]) == 48


def test_metadata_is_stored_before_the_first_shard_is_begun(tmp_path: Path) -> None:
    store = Watched()
    small = ONE | {"tokenizer.json": bytes(SMALL_FILE)}
    taken(tmp_path, store, small | {f"shard{n}": bytes(SMALL_FILE + 1) for n in range(3)})()
    assert small.items() <= kept(store)["checkpoint-4"]["n0"].items()
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
    sizes = {name: about.size for name, about in first.items() if RECORDS not in name}
    assert sizes == {f"run/checkpoint-4/{path}": len(content) for path, content in ONE.items()}
    taken(tmp_path, Telling(), ONE)()
    assert abouts == first


def test_more_files_than_a_manifest_can_name_are_refused_before_one_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    held, seen, to = on_the_way(tmp_path, store)
    draft = draft_of(seen)
    monkeypatch.setitem(io.LIMITS, "manifest", 100 * len(draft.files))
    with pytest.raises(Unsupported, match="its manifest would have"):
        upload(draft, held, to)
    assert list(store.names("")) == []


def test_a_time_that_no_record_can_say_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    held, seen, to = on_the_way(tmp_path, store)
    draft = draft_of(seen)
    late = replace(draft, files=tuple(replace(f, mtime=2**63) for f in draft.files))
    with pytest.raises(Unsupported, match="its time is after the year 2262"):
        upload(late, held, to)
    assert list(store.names("")) == []


NAME = "run/.ckptsync/checkpoint-4/sending/n0"


def sender_of(store: MemoryStore, node: str, after_chunk: AfterChunk = ignore_chunk) -> FileSender:
    """A node that sends checkpoint-4, and has no file of it yet."""
    to = replace(context(store, node), after_chunk=after_chunk)
    return FileSender(LocalFiles("checkpoint-4", "trainer", {}), to)


def test_an_upload_is_announced_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = MemoryStore(), list[int]()
    sender = sender_of(store, "n0", told.append)
    with sender.announce():
        (first,) = store.names("")
        sender.pool.end_chunk(6)
        assert [*store.names("")] == [first], "it is renewed once a minute"
        monkeypatch.setattr(upload_module, "ANNOUNCE_EVERY", -1.0)
        sender.pool.end_chunk(7)
        (again,) = store.names("")
        assert first.name == again.name == NAME
        assert first.mtime < again.mtime
    sender.pool.end_chunk(8)
    assert (read_all(store, NAME), told) == (b"", [6, 7, 8])


def test_that_it_cannot_be_taken_back_is_no_error() -> None:
    store = MemoryStore()

    def write(*_: object) -> None:
        raise StoreError("away")

    with sender_of(store, "n0").announce():
        store.write = write  # type: ignore[method-assign,assignment]
    assert read_all(store, NAME) == b"sending\n"


@pytest.mark.parametrize("is_held", [True, False])
def test_a_save_in_a_location_taken_before_it_moves_once_nobody_sends(
    tmp_path: Path, *, is_held: bool
) -> None:
    store = Overtaken()
    held, seen, to = on_the_way(tmp_path, store)
    draft = draft_of(seen)
    upload(draft, held, to)
    put(
        store,
        replace(draft, node="m", files=(), started=0, ended=1, location="checkpoint-4", ranks=(7,)),
    )
    local_files = held if is_held else LocalFiles("checkpoint-4", "trainer", {})
    sending = "run/.ckptsync/checkpoint-4/sending/m"
    store.write(sending, [b"sending"])
    # the other node ends between two readings: what it has stored may be of this save
    store.nth, store.meanwhile = 2, lambda: store.write(sending, [b""])
    assert correct_location("n0", "checkpoint-4", local_files, to) == "checkpoint-4"

    location = correct_location("n0", "checkpoint-4", local_files, to)

    assert location.startswith("checkpoint-4~")
    assert kept(store)[location] == {"n0": ONE}
    assert [k.manifest.location for k in manifests(store) if k.manifest.node == "n0"] == [location]


class Unclaimable(MemoryStore):
    """A store that cannot tell whether somebody else has just written the name."""

    is_exclusive = False


def test_a_file_that_lies_beside_stays_there_for_ever(tmp_path: Path) -> None:
    store = MemoryStore()
    sources = {"a": lay(tmp_path / "a" / "run", ONE), "b": lay(tmp_path / "b" / "run", TWO, 0.5)}
    for node in "ab":
        push_now(sources[node], store, node)
    (mine,) = (k for k in manifests(store) if k.manifest.node == "a")
    elsewhere = replace(mine.manifest, location="checkpoint-4~else", save="else")
    put(store, replace(elsewhere, supersedes=(mine.name,)))
    before = {e.name: e.mtime for e in store.names("run/")}
    push_now(sources["b"], store, "b")
    assert {e.name: e.mtime for e in store.names("run/")} == before
    assert read_all(store, "run/.ckptsync/checkpoint-4/files/b/x") == TWO["x"]


def test_of_two_nodes_that_named_one_file_each_ends_with_its_own(tmp_path: Path) -> None:
    for order in ("ab", "ba"):
        store = Unclaimable()
        sources = {
            "a": lay(tmp_path / "a" / "run", ONE),
            "b": lay(tmp_path / "b" / "run", TWO, 0.5),
        }
        for node in order:  # neither saw the other's manifest: the last to write has the name
            alone = MemoryStore()
            push_now(sources[node], alone, node)
            for name in [e.name for e in alone.names("run/")]:
                store.write(name, [read_all(alone, name)])
        for node in (*order, *order):
            push_now(sources[node], store, node)
        assert kept(store) == {"checkpoint-4": {"a": ONE, "b": TWO}}
        names = [e.name for e in store.names("run/")]
        for node in order:
            push_now(sources[node], store, node)
        assert [e.name for e in store.names("run/")] == names, "nothing is left to say"


def test_no_module_of_the_worker_deletes_anything_in_a_store() -> None:
    (folder,) = ckptsync.worker.__path__
    assert [path.name for path in Path(folder).glob("*.py") if ".delete(" in path.read_text()] == []


def records_in(store: MemoryStore) -> RunRecords:
    return read_run(store, "run", RunRecords())


def test_another_node_is_a_rival_as_long_as_it_says_so_and_of_that_checkpoint_only() -> None:
    store = MemoryStore()
    with sender_of(store, "n1").announce():
        assert records_in(store).is_contended("n0", "run", "checkpoint-4")
        assert not records_in(store).is_contended("n1", "run", "checkpoint-4")
        assert not records_in(store).is_contended("n0", "run", "checkpoint-40")
        assert not records_in(store).is_contended("n0", "run", "checkpoint-8")
    assert not records_in(store).is_contended("n0", "run", "checkpoint-4")


def test_one_that_failed_is_none_and_one_that_was_killed_is_none_after_a_while() -> None:
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), sender_of(store, "n1").announce():
        raise ZeroDivisionError
    assert not records_in(store).is_contended("n0", "run", "checkpoint-4")
    killed = sender_of(store, "n1").announce()
    killed.__enter__()
    for _ in range(int(SENDING) - 1):  # each write is a second on this store's clock
        store.write("run/.ckptsync/checkpoint-8/sending/n0", [b"sending"])
    assert records_in(store).is_contended("n0", "run", "checkpoint-4")
    store.write("run/.ckptsync/checkpoint-8/sending/n0", [b"sending"])
    assert not records_in(store).is_contended("n0", "run", "checkpoint-4")


SAME = {node: {f"s{node}": node.encode(), "x": b"one"} for node in "abc"}
OTHER = {
    node: {f"s{node}": node.encode(), "x": b"B?" if node == "c" else f"{node.upper()}?".encode()}
    for node in "abc"
}
LOCATION = "checkpoint-4"


def sources(root: Path, nodes: dict[str, dict[str, bytes]]) -> dict[str, Path]:
    return {
        node: lay(root / node / "run", files, n / 10)
        for n, (node, files) in enumerate(nodes.items())
    }


def pushing(source: Path, node: str) -> Callable[[Store], object]:
    return lambda store: push_now(source, store, node, threads=1)


def race(seed: int, store: MemoryStore, root: Path, nodes: dict[str, dict[str, bytes]]) -> bool:
    """Whether every node was done at once; one that was told to wait for another is asked again."""
    its = sources(root, nodes)
    outcomes = raced(
        seed, store, {n: pushing(s, n) for n, s in its.items()}, is_exclusive=store.is_exclusive
    )
    assert all(isinstance(o, (tuple, Incomplete)) for o in outcomes.values()), outcomes
    return not any(isinstance(o, Incomplete) for o in outcomes.values())


@pytest.mark.parametrize("nodes", [SAME, OTHER], ids=["same", "other"])
def test_what_was_acknowledged_is_there_in_whatever_order_they_come(
    tmp_path: Path, nodes: dict[str, dict[str, bytes]]
) -> None:
    done, seeds = 0, sampled(range(30), 3)
    for seed in seeds:
        store = MemoryStore()
        done += race(seed, store, tmp_path, nodes)
        kept(store)  # whoever ended, ended with his bytes where his manifest says
        if nodes is SAME:  # the same bytes are in the store once, whoever comes first
            assert not [e.name for e in store.names("") if "/files/" in e.name], seed
        for node, source in sources(tmp_path, nodes).items():
            push_now(source, store, node)
        assert kept(store) == {LOCATION: nodes}, seed
    assert done > len(seeds) // 3


@pytest.mark.parametrize("nodes", [SAME, OTHER], ids=["same", "other"])
def test_where_names_cannot_be_claimed_it_is_right_after_one_more_look(
    tmp_path: Path, nodes: dict[str, dict[str, bytes]]
) -> None:
    for seed in sampled(range(30), 3):
        store = Unclaimable()
        race(seed, store, tmp_path, nodes)
        for node, source in (*sources(tmp_path, nodes).items(), *sources(tmp_path, nodes).items()):
            push_now(source, store, node)
        assert kept(store) == {LOCATION: nodes}, seed


def test_who_binds_a_name_while_another_sends_keeps_it(tmp_path: Path) -> None:
    for nth in range(5):
        store, its = MemoryStore(), sources(tmp_path / str(nth), OTHER)
        push_now(
            its["a"],
            Interrupted(store, nth, lambda s=store, i=its: push_now(i["c"], s, "c")),  # type: ignore[misc]
            "a",
        )
        # nobody needs to look again
        assert kept(store)[LOCATION] == {node: OTHER[node] for node in "ac"}


def test_a_name_that_another_node_claims_while_it_is_written_is_not_taken(tmp_path: Path) -> None:
    store, nodes = MemoryStore(), {"a": {"x": b"A?"}, "c": {"x": b"orphan"}}
    store.write("run/checkpoint-4/x", [b"orphan"])
    its = sources(tmp_path, nodes)

    def claim(count: int) -> None:
        if count < 0:  # the bytes are read again, in place of the orphan's
            push_now(its["c"], store, "c")

    push_now(its["a"], store, "a", after_chunk=claim)
    assert kept(store) == {LOCATION: nodes}
