"""What was reported and lies in a store, back on a disk: ``with as_directory(ray.train.get_checkpoint()) as folder``."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptsync.catalogue.fresh import fresh_place, hidden_by
from ckptsync.config import reach
from ckptsync.config.loading import from_environment
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray_note import Note
from ckptsync.pull.bringing import carry_out
from ckptsync.pull.landing import Landing
from ckptsync.pull.wanted import Order, whole
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import open_store
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located


@contextlib.contextmanager
def as_directory(checkpoint: Any) -> Iterator[str]:
    """As Ray's own ``Checkpoint.as_directory``, also of one that is in a store: all ranks' parts, every byte proven on its way, gone afterwards.

    Raises Incomplete if not all of it can be had, and what `ckptsync.pull` raises.
    """
    note = ray_note.read(checkpoint)
    if note is None:
        with checkpoint.as_directory() as local:
            yield local
        return
    with tempfile.TemporaryDirectory(prefix="ckptsync-ray-") as home:
        yield str(bring(note, Path(home)))


def bring(note: Note, home: Path) -> Path:
    """All of it, in a directory below ``home``."""
    access = reached()
    store = opened(note, access)
    order = _order(store, note)
    pulled = carry_out(store, Landing(home, order), threads=access.limits.threads)
    lacking = [*order.lacking, *(f"{path}: {error}" for path, error in sorted(pulled.failed.items()))]
    if lacking:
        raise Incomplete(
            f"{note.url}: not all of it can be had: {'; '.join(lacking[:3])}", hint="`ckptsync verify` says what is damaged"
        )
    return pulled.where


def _order(store: Store, note: Note) -> Order:
    """Of this very place: another save of the same name may be newer, and is not what was reported."""
    found = fresh_place(store, note.run, note.place)
    for fault in found.faults:
        if hidden_by([fault]):
            raise fault.error
    seen = found.of(note.run, note.place)
    if seen is None:
        raise Incomplete(f"{note.url}: no manifest of it counts", hint="the store's retention may have let it go: `ckptsync ls`")
    if seen.word == "AMBIGUOUS":
        raise Corrupt(f"{note.url}: nobody can say which of its files are of one save: {'; '.join(seen.evidence[:1])}")
    return whole(seen)


def opened(note: Note, access: Access) -> Store:
    """The store that a note names.  Raises ConfigError, StoreError."""
    place = located(note.store)
    return open_store(note.store, access.options_of(place) if isinstance(place, Remote) else {}, access.limits)


def reached() -> Access:
    """How stores are reached, as this process's environment says (docs/cli.md); raises ConfigError."""
    options, asked = from_environment()
    return Access(options, reach.limits(asked))
