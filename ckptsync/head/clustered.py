"""Models made on a Ray cluster: each file of weights by a task that reads from the store and writes to it, as carefully as a head does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ckptsync.head.checked import CheckedFiles
from ckptsync.head.placing import InTheWay, Writing
from ckptsync.merge.consolidate import Write
from ckptsync.merge.ray import RayEngine, Reach
from ckptsync.model import Files
from ckptsync.records.manifest import FileEntry
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import About
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import open_store
from ckptsync.stores.pieces import fetched
from ckptsync.stores.tree import StoreFiles


@dataclass(frozen=True, slots=True)
class Clustered:
    """The cluster at ``address``, whose every node reaches the store at ``url``: a path must lead to the same directory on each."""

    address: str
    url: str
    options: Mapping[str, object] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)

    def engine(self, seen: Snapshot, prefix: str, abouts: Mapping[str, About]) -> RayEngine:
        """For the model of one location, which is written below ``prefix``; it raises InTheWay as `Writing.put` does."""
        plain = replace(self, limits=replace(self.limits, pace=Limits().pace))  # a pace is one process's own
        there = seen.present()
        entries = {path: seen.files[path][0].entry for path in there}
        return RayEngine(
            self.address, Reach(partial(files, plain, there, entries), partial(write, plain, prefix, dict(abouts)), (InTheWay,))
        )


def files(where: Clustered, there: Mapping[str, tuple[str, int]], entries: Mapping[str, FileEntry]) -> Files:
    """On a node of the cluster: a checkpoint's own files, each byte checked as it is read."""
    store = open_store(where.url, where.options, where.limits)
    return CheckedFiles(fetched(StoreFiles(store, there), store), entries)


def write(where: Clustered, prefix: str, abouts: Mapping[str, About]) -> Write:
    """On a node of the cluster: creates files of the model."""
    return Writing(open_store(where.url, where.options, where.limits), prefix, abouts).put
