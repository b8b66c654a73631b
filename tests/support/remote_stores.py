"""Stores that stand for locations elsewhere: what the merge, `inspect` and `verify` see of one,
without a network.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ckptsync.merger.destination import check_free, merge
from ckptsync.merger.engine import MergeResult
from ckptsync.merger.inputs import MergeRequest, open_sources
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, StoreWrapper
from ckptsync.stores.limits import Limits
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.urls import Remote
from tests.support.files_in_memory import contents

OUT = Remote("mem", "out")
KEEP = MergeOptions("keep", max_shard_size=11_000)


def filled(store: Store, directory: Path) -> Store:
    """Write the files below a directory into a store, and return it."""
    for name, data in contents(directory).items():
        store.write(name, [data])
    return store


def reaching(stores: Mapping[Remote, Store]) -> Access:
    """Return an access to these stores, each at its location."""
    return Access({}, Limits(), {location.url: store for location, store in stores.items()})


def far(sources: Sequence[Path]) -> dict[Remote, Store]:
    """Return a store in memory for each directory, with its files."""
    return {
        Remote("mem", f"node{n}"): filled(MemoryStore(f"mem://node{n}"), source)
        for n, source in enumerate(sources)
    }


def merge_into(
    store: Store,
    stores: Mapping[Remote, Store],
    sources: Sequence[PathOrUrl] = (),
    options: MergeOptions = KEEP,
    work: MergeResources | None = None,
) -> MergeResult:
    """Merge all ``stores``, or ``sources``, into a store at `OUT`."""
    access = reaching({**stores, OUT: store})
    request = MergeRequest(sources or tuple(stores), OUT, options)
    check_free(request, access)
    return merge(open_sources(request, access), access, work=work)


class Counting(StoreWrapper):
    """A store in front of another that counts what is asked of it, and bytes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        self.read = 0
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._lock:
            self.reads[name] += 1
            self.read += out.nbytes
        self.inner.read_into(name, start, out)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        with self._lock:
            self.writes[name] += 1
        self.inner.write(name, chunks, about)

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.writes[name] += 1
        self.inner.create(name, chunks, about)
