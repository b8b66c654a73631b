"""What a merge reads and where it writes, opened anew: by a task on another machine, which is told no more than where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptsync.errors import ConfigError, Incomplete
from ckptsync.merge.consolidate import Chunk, Write
from ckptsync.merge.looking import Prepared
from ckptsync.merge.ray import Reach
from ckptsync.merge.remote import bound, origin
from ckptsync.model import Files
from ckptsync.stores import trees
from ckptsync.stores.contract import UNKNOWN, About, Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.posix.store import PosixStore
from ckptsync.stores.tree import Overlay
from ckptsync.stores.trees import Access, Place
from ckptsync.stores.urls import Remote


def reach(prepared: Prepared, access: Access, directory: Path | None = None) -> Reach:
    """Of a merge that is planned; ``directory``: where a local one is written until it appears."""
    plain = replace(access, limits=_plain(access.limits), _opened={})
    states = tuple(tree.state() for tree in prepared.trees)
    plan = bound(prepared)
    abouts = {file.name: About(file.size, origin(plan, file.name)) for file in prepared.job.plans}
    target = directory or prepared.destination
    return Reach(partial(_files, tuple(prepared.asked.sources), plain, states), partial(_write, target, plain, abouts))


def _plain(limits: Limits) -> Limits:
    """Without a pace, which is one process's own."""
    return replace(limits, pace=Limits().pace)


def _files(sources: Sequence[Place], access: Access, states: Sequence[str]) -> Files:
    """Raises ConfigError, Incomplete where they are not what was planned from."""
    found = [trees.tree(source, access) for source in sources]
    for tree, wanted in zip(found, states, strict=True):
        if tree.state() != wanted:
            raise Incomplete(
                f"{tree.root}: not as it was planned from",
                hint="a path must lead to the same files on every node of the cluster; was something changed?",
            )
    return trees.near(Overlay(found), sources)


def _write(target: Place, access: Access, abouts: dict[str, About]) -> Write:
    store: Store
    if isinstance(target, Remote):
        store = access.store(target)
    else:
        if not target.is_dir():
            raise ConfigError(
                f"{target}: not on this node", hint="a cluster of several nodes writes to a URL, or to a disk that they share"
            )
        store = PosixStore(str(target))

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        store.write(name, chunks, abouts.get(name, UNKNOWN))

    return write
