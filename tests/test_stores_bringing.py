"""Many files by several threads: all of them are there, or the first error is raised and what is there is whole."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ckptsync.digest import digest_stream
from ckptsync.errors import CkptsyncError, Corrupt, NotFound, StoreError
from ckptsync.stores.arrival import RANGE, Wanted
from ckptsync.stores.bringing import bring
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import bare
from ckptsync.stores.posix.store import PosixStore
from tests.weed import weed

CONTENTS = {f"d{n % 3}/f{n}": os.urandom(n * 1000) for n in range(20)} | {"large": os.urandom(RANGE + 12345)}


def sent(store: Store) -> list[Wanted]:
    for name, data in CONTENTS.items():
        store.write(f"run/{name}", [data])
    return [Wanted(f"run/{name}", name, len(data), digest_stream([data], len(data))) for name, data in CONTENTS.items()]


def brought(target: PosixStore) -> dict[str, bytes]:
    return {e.name: read_all(target, e.name) for e in target.names("")}


def no_thread_is_left() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("ckptsync-bring")]


@pytest.mark.parametrize("kind", ["memory", "s3"])
@pytest.mark.parametrize("threads", [1, 5])
def test_all_files_arrive(tmp_path: Path, kind: str, threads: int) -> None:
    store: Store = MemoryStore() if kind == "memory" else bare(f"s3://{weed().bucket()}", weed().options())
    target, told = PosixStore(str(tmp_path)), list[int]()
    bring(store, target, sent(store), threads, told.append)
    assert brought(target) == CONTENTS
    assert sum(told) == sum(map(len, CONTENTS.values()))
    assert no_thread_is_left()


@pytest.mark.parametrize("name", ["d1/f7", "large"])
def test_damage_is_told_and_only_whole_files_stay(tmp_path: Path, name: str) -> None:
    store, target = MemoryStore(), PosixStore(str(tmp_path))
    wanted = sent(store)
    data = CONTENTS[name]
    store.write(f"run/{name}", [data[:-1] + bytes([data[-1] ^ 1])])
    with pytest.raises(Corrupt, match=f"run/{name}"):
        bring(store, target, wanted, 3)
    found = brought(target)
    assert name not in found
    assert found.items() <= CONTENTS.items()
    assert not [p for p in tmp_path.rglob(".*") if p.is_file()]
    assert no_thread_is_left()


def test_what_is_not_there_is_told_and_nothing_else_is_begun(tmp_path: Path) -> None:
    store, target = MemoryStore(), PosixStore(str(tmp_path))
    wanted = sent(store)
    with pytest.raises(NotFound, match="absent"):
        bring(store, target, [Wanted("absent", "x", 10, None), *wanted], 1)
    assert brought(target) == {}


def test_where_somebody_is_told_of_files_that_cannot_be_had_all_others_are_brought(tmp_path: Path) -> None:
    store, target = MemoryStore(), PosixStore(str(tmp_path))
    wanted = sent(store)
    failed: dict[str, CkptsyncError] = {}
    store.delete("run/d1/f4")
    for name in ("large", "d1/f7"):
        store.write(f"run/{name}", [CONTENTS[name][:-1] + b"?!"[CONTENTS[name][-1] == b"?"[0] :][:1]])
    bring(store, target, wanted, 3, failed=lambda one, error: failed.setdefault(one.under, error))
    assert brought(target) == {name: data for name, data in CONTENTS.items() if name not in failed}
    assert {name: type(error) for name, error in failed.items()} == {"large": Corrupt, "d1/f7": Corrupt, "d1/f4": NotFound}
    assert not [p for p in tmp_path.rglob(".*") if p.is_file()]


@pytest.mark.parametrize("threads", [1, 3])
def test_of_a_file_that_is_spoilt_no_further_range_is_brought(tmp_path: Path, threads: int) -> None:
    store, target = MemoryStore(), PosixStore(str(tmp_path))
    wanted = [one for one in sent(store) if one.under in ("large", "d1/f7")]
    store.write("run/large", [b"?" + CONTENTS["large"][1:]])
    failed: list[str] = []
    bring(store, target, wanted[::-1], threads, failed=lambda one, _: failed.append(one.under))
    assert (failed, set(brought(target))) == (["large"], {"d1/f7"})


class Interrupting(MemoryStore):
    """Its caller is interrupted in the middle of the large file's first range; whoever reads waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = threading.Event()

    def interrupt(self, *_: object) -> None:
        self.happened.set()
        raise KeyboardInterrupt

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name == "run/large" and start == RANGE // 2:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.happened.wait()
        super().read_into(name, start, out)


def test_an_interrupted_call_ends_soon_and_the_next_one_goes_on_from_there(tmp_path: Path) -> None:
    store, target, told = Interrupting(), PosixStore(str(tmp_path)), list[int]()
    (large,) = [one for one in sent(store) if one.under == "large"]
    before = signal.signal(signal.SIGINT, store.interrupt)
    with pytest.raises(KeyboardInterrupt):
        bring(store, target, [large], 1)
    signal.signal(signal.SIGINT, before)
    assert no_thread_is_left()
    left = MemoryStore()
    left.write("run/large", [CONTENTS["large"]])
    bring(left, target, [large], 1, told.append)
    assert brought(target) == {"large": CONTENTS["large"]}
    assert sum(told) <= RANGE / 2 + 12345


def test_a_store_that_refuses_ends_it_for_all(tmp_path: Path) -> None:
    class Refusing(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError(f"{name}: forbidden")

    store = Refusing()
    with pytest.raises(StoreError, match="forbidden"):
        bring(store, PosixStore(str(tmp_path)), sent(store), 2, failed=lambda *_: None)
