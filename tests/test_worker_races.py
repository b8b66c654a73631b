"""Several nodes that send files of one name at once: in orders of steps that are drawn, as threads, and killed on the way."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.worker.push import push_now
from tests.dying import Crash, Dying
from tests.interleaved import raced
from tests.sshd import sshd
from tests.test_worker_push import Interrupted, kept, lay, manifests
from tests.test_worker_sources import in_a_bucket, in_memory, on_disk

SAME = {node: {f"s{node}": node.encode(), "x": b"one"} for node in "abc"}
OTHER = {node: {f"s{node}": node.encode(), "x": b"B?" if node == "c" else f"{node.upper()}?".encode()} for node in "abc"}
LOCATION = "checkpoint-4"


def sources(root: Path, nodes: dict[str, dict[str, bytes]]) -> dict[str, Path]:
    return {node: lay(root / node / "run", files, n / 10) for n, (node, files) in enumerate(nodes.items())}


class Unclaimable(MemoryStore):
    """A store that cannot tell whether somebody else has just written the name."""

    is_exclusive = False


def pushing(source: Path, node: str) -> Callable[[Store], object]:
    return lambda store: push_now(source, store, node, threads=1)


def race(seed: int, store: MemoryStore, root: Path, nodes: dict[str, dict[str, bytes]]) -> bool:
    """Whether every node was done at once; one that was told to wait for another is asked again."""
    its = sources(root, nodes)
    outcomes = raced(seed, store, {n: pushing(s, n) for n, s in its.items()}, is_exclusive=store.is_exclusive)
    assert all(isinstance(o, (tuple, Incomplete)) for o in outcomes.values()), outcomes
    return not any(isinstance(o, Incomplete) for o in outcomes.values())


@pytest.mark.parametrize("nodes", [SAME, OTHER], ids=["same", "other"])
def test_what_was_acknowledged_is_there_in_whatever_order_they_come(tmp_path: Path, nodes: dict[str, dict[str, bytes]]) -> None:
    done = 0
    for seed in range(30):
        store = MemoryStore()
        done += race(seed, store, tmp_path, nodes)
        kept(store)  # whoever ended, ended with his bytes where his manifest says
        for node, source in sources(tmp_path, nodes).items():
            push_now(source, store, node)
        assert kept(store) == {LOCATION: nodes}, seed
    assert done > 10


@pytest.mark.parametrize("nodes", [SAME, OTHER], ids=["same", "other"])
def test_where_names_cannot_be_claimed_it_is_right_after_one_more_look(tmp_path: Path, nodes: dict[str, dict[str, bytes]]) -> None:
    for seed in range(30):
        store = Unclaimable()
        race(seed, store, tmp_path, nodes)
        for node, source in (*sources(tmp_path, nodes).items(), *sources(tmp_path, nodes).items()):
            push_now(source, store, node)
        assert kept(store) == {LOCATION: nodes}, seed


class Arriving(MemoryStore):
    """Counts the bytes that arrive, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.came: Counter[str] = Counter()

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        super().write(name, self._counted(name, chunks), about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.size_or_exists(name)
        super().create(name, self._counted(name, chunks), about)

    def size_or_exists(self, name: str) -> None:
        if any(e.name == name for e in self.names("")):
            super().create(name, [])

    def _counted(self, name: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            self.came[name] += len(chunk)
            yield chunk


def test_the_same_bytes_are_sent_once_by_those_who_come_one_after_the_other(tmp_path: Path) -> None:
    store = Arriving()
    for node, source in sources(tmp_path, SAME).items():
        push_now(source, store, node)
    assert store.came[f"run/{LOCATION}/x"] == len(b"one")
    assert not [name for name in store.came if "/files/" in name]


def test_the_same_bytes_are_in_the_store_once_whoever_comes_first(tmp_path: Path) -> None:
    for seed in range(30):
        store = MemoryStore()
        race(seed, store, tmp_path, SAME)
        assert not [e.name for e in store.names("") if "/files/" in e.name], seed


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("abc")])
def test_other_bytes_lie_beside_the_first_whoever_comes_first(tmp_path: Path, order: str) -> None:
    store, its = MemoryStore(), sources(tmp_path, OTHER)
    for node in (*order, *order):
        push_now(its[node], store, node)
    assert kept(store) == {LOCATION: OTHER}
    assert {k.manifest.n for k in manifests(store)} == {0}


def test_who_binds_a_name_while_another_sends_keeps_it_and_the_other_lies_beside(tmp_path: Path) -> None:
    for nth in range(5):
        store, its = MemoryStore(), sources(tmp_path / str(nth), OTHER)
        push_now(its["a"], Interrupted(store, nth, lambda s=store, i=its: push_now(i["c"], s, "c")), "a")  # type: ignore[misc]
        assert kept(store)[LOCATION] == {node: OTHER[node] for node in "ac"}  # nobody needs to look again


def test_bytes_that_a_node_is_sending_now_are_left_alone_and_ours_lie_beside(tmp_path: Path) -> None:
    store, its = MemoryStore(), sources(tmp_path, OTHER)
    store.write(f"run/.ckptsync/{LOCATION}/sending/a", [b"sending"])
    store.write(f"run/{LOCATION}/x", [OTHER["a"]["x"]])
    push_now(its["b"], store, "b")
    assert read_all(store, f"run/{LOCATION}/x") == OTHER["a"]["x"]
    assert read_all(store, f"run/.ckptsync/{LOCATION}/files/b/x") == OTHER["b"]["x"]
    push_now(its["a"], store, "a")
    assert kept(store) == {LOCATION: {node: OTHER[node] for node in "ab"}}


def until_done(source: Path, store: Store, node: str) -> None:
    """As a daemon does, or somebody who is told to push again."""
    for _ in range(200):
        try:
            push_now(source, store, node)
        except Incomplete:
            continue
        return
    raise AssertionError(f"{node} was never done")


def over_ssh(path: Path) -> Store:
    server = sshd()
    return create_store(server.url(path / "store"), server.options)


@pytest.mark.parametrize("made", [in_memory, on_disk, in_a_bucket, over_ssh])
def test_threads_that_race_for_real_end_where_they_belong(tmp_path: Path, made: Callable[[Path], Store]) -> None:
    its = sources(tmp_path, OTHER)
    store = made(tmp_path)
    with ThreadPoolExecutor(len(its)) as pool:
        for future in [pool.submit(until_done, source, store, node) for node, source in its.items()]:
            future.result()
    assert kept(store) == {LOCATION: OTHER}


def test_one_that_is_killed_among_others_is_finished_by_its_next_life(tmp_path: Path) -> None:
    its = sources(tmp_path, OTHER)
    for seed in range(30):
        store, victim = MemoryStore(), "abc"[seed % 3]

        def dying(store: Store, node: str = victim, lives: int = random.Random(seed).randrange(40)) -> object:
            return push_now(its[node], Dying(store, lives), node, threads=1)

        outcomes = raced(seed, store, {n: pushing(s, n) for n, s in its.items()} | {victim: dying}, is_exclusive=True)
        assert all(isinstance(o, (tuple, CkptsyncError, Crash)) for o in outcomes.values()), outcomes
        for _ in range(950):  # the dead one's word that it is sending grows old: each write is a second on this store's clock
            store.write("run/.ckptsync/clock", [b""])
        for node, source in (*its.items(), *its.items()):
            until_done(source, store, node)
        assert kept(store) == {LOCATION: OTHER}, seed
