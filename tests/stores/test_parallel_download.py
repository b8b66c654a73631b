"""Many files by several threads: all of them arrive verified, or the first error is raised and
every file there is whole.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync.digest import digest_stream
from ckptsync.errors import Corrupt, NotFound, StoreError, Transient
from ckptsync.stores import parallel_download
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.parallel_download import RANGE, StoredFile, download
from ckptsync.stores.posix.draft import Draft
from ckptsync.stores.posix.store import PosixStore

CONTENTS = {f"d{n % 3}/f{n}": os.urandom(n * 1000) for n in range(20)} | {
    "large": os.urandom(RANGE + 12345)
}


def sent(store: Store) -> list[StoredFile]:
    for name, data in CONTENTS.items():
        store.write(f"run/{name}", [data])
    return [
        StoredFile(f"run/{name}", name, len(data), digest_stream([data], len(data)))
        for name, data in CONTENTS.items()
    ]


def files_in(target: PosixStore) -> dict[str, bytes]:
    return {e.name: read_all(target, e.name) for e in target.names("")}


def no_thread_is_left() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith("ckptsync-download")]


@pytest.mark.parametrize("threads", [1, 5])
def test_all_files_arrive(tmp_path: Path, threads: int) -> None:
    store, target, told = MemoryStore(), PosixStore(str(tmp_path)), list[int]()
    download(store, target, sent(store), threads, told.append)
    assert files_in(target) == CONTENTS
    assert sum(told) == sum(map(len, CONTENTS.values()))
    assert no_thread_is_left()


def test_what_is_damaged_or_missing_is_told_and_all_other_files_are_downloaded(
    tmp_path: Path,
) -> None:
    store, target = MemoryStore(), PosixStore(str(tmp_path))
    wanted = sent(store)
    store.delete("run/d1/f4")
    for name in ("large", "d1/f7"):
        store.write(f"run/{name}", [CONTENTS[name][:-1] + bytes([CONTENTS[name][-1] ^ 1])])
    failed = download(store, target, wanted, 3)
    assert files_in(target) == {name: data for name, data in CONTENTS.items() if name not in failed}
    assert {name: type(error) for name, error in failed.items()} == {
        "large": Corrupt,
        "d1/f7": Corrupt,
        "d1/f4": NotFound,
    }
    assert not [p for p in tmp_path.rglob(".*") if p.is_file()]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_further_range_of_a_failed_file_is_downloaded(tmp_path: Path, threads: int) -> None:
    store, target = MemoryStore(), PosixStore(str(tmp_path))
    wanted = [one for one in sent(store) if one.under in ("large", "d1/f7")]
    store.write("run/large", [b"?" + CONTENTS["large"][1:]])
    failed = download(store, target, wanted[::-1], threads)
    assert (list(failed), set(files_in(target))) == (["large"], {"d1/f7"})


class Interrupting(MemoryStore):
    """Its caller is interrupted in the middle of the large file's first range.

    Whoever reads waits for that.
    """

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
        download(store, target, [large], 1)
    signal.signal(signal.SIGINT, before)
    assert no_thread_is_left()
    left = MemoryStore()
    left.write("run/large", [CONTENTS["large"]])
    download(left, target, [large], 1, told.append)
    assert files_in(target) == {"large": CONTENTS["large"]}
    assert RANGE / 4 <= sum(told) <= RANGE / 2 + 12345


def test_a_store_that_refuses_ends_it_for_all(tmp_path: Path) -> None:
    class Refusing(MemoryStore):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError(f"{name}: forbidden")

    store = Refusing()
    with pytest.raises(StoreError, match="forbidden"):
        download(store, PosixStore(str(tmp_path)), sent(store), 2)


CONTENT = bytes(range(251)) * 4200  # a little more than a MiB: blocks of 4 KiB
DIGEST = digest_stream([CONTENT], len(CONTENT))
FILE = StoredFile("run/a", "a", len(CONTENT), DIGEST)


class Source(MemoryStore):
    """Remembers what was asked of it."""

    def __init__(self, content: bytes = CONTENT) -> None:
        super().__init__()
        self.write("run/a", [content])
        self.asked: list[tuple[int, int]] = []

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.asked.append((start, start + len(out)))
        super().read_into(name, start, out)


def test_ranges_are_whole_blocks_and_together_the_file() -> None:
    for size in (0, 1, RANGE, RANGE + 1, 5 * RANGE - 7):
        spans = StoredFile("a", "a", size, None).ranges()
        assert spans[0][0] == 0
        assert spans[-1][1] == size
        assert all(a[1] == b[0] and a[1] % RANGE == 0 for a, b in itertools.pairwise(spans))


def test_a_file_without_a_digest_arrives_too(tmp_path: Path) -> None:
    target = PosixStore(str(tmp_path))
    assert download(Source(), target, [StoredFile("run/a", "a", len(CONTENT), None)]) == {}
    assert read_all(target, "a") == CONTENT


class SharedLock:
    """A lock of two threads; whoever releases it waits until the other one has released it too."""

    _both = threading.Barrier(2, timeout=60)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._both.wait()


def test_of_threads_that_end_at_once_one_publishes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_download, "threading", SimpleNamespace(Lock=SharedLock))
    monkeypatch.setattr(parallel_download, "RANGE", 2)
    commits: list[str] = []
    monkeypatch.setattr(Draft, "commit", lambda draft: commits.append(draft.name))
    file = StoredFile("run/a", "a", 4, None)
    assert download(Source(b"abcd"), PosixStore(str(tmp_path)), [file], 2) == {}
    assert commits == ["a"]


@pytest.mark.parametrize("killed", [Transient("cut"), KeyboardInterrupt()])
def test_blocks_that_an_earlier_try_left_are_not_asked_for_again(
    tmp_path: Path, killed: BaseException
) -> None:
    target, first = PosixStore(str(tmp_path)), 256 << 10
    draft = target.open_draft("a", FILE.size, DIGEST.digest)
    draft.write_at(0, memoryview(CONTENT)[:first])
    draft.write_at(5000, memoryview(b"?"))  # its block is wrong
    draft.write_at(first + 8192, memoryview(CONTENT)[first + 8192 : first + 16384])
    if isinstance(killed, Transient):
        draft.give_up(killed)
    else:
        draft.end(keep=True)
    source = Source()
    assert download(source, target, [FILE]) == {}
    assert read_all(target, "a") == CONTENT
    assert source.asked[:2] == [(4096, 8192), (first, first + 8192)]
    assert sum(end - start for start, end in source.asked) == len(CONTENT) - first + 4096 - 8192
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
