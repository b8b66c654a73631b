"""``upload_fn``: a Ray worker's local checkpoint goes to the store, as this rank's part of it.

Ray Train 2.60 demands of a ``checkpoint_upload_fn`` a ``Checkpoint`` in the experiment's directory, the same path on every rank (``checkpoint_manager.py``,
``report_handler.py``): it gets one that holds a note of the place (`ckptsync.hooks.ray_note`).  The bytes do not go through ``storage_path``.

What is sent is safe before ``report`` goes on: the manifest is the last that is written, and Ray is told of the checkpoint when every rank's is there.  Killed
before, it is no checkpoint to Ray, and nothing half sent counts in the store.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsync import scan
from ckptsync.config import reach
from ckptsync.config.loading import from_environment
from ckptsync.errors import ConfigError, Incomplete
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray_note import Note
from ckptsync.pull.bringing import carry_out
from ckptsync.pull.landing import Landing
from ckptsync.pull.ordering import Asked, ordered
from ckptsync.records.names import CONSOLIDATED, checked_node
from ckptsync.spool.marks import save_id
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store, open_store
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located
from ckptsync.worker.node import node_id
from ckptsync.worker.offering import Offer
from ckptsync.worker.options import checked_run
from ckptsync.worker.push import push_offer
from ckptsync.worker.result import Progress

_AGAIN = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class UploadFn:
    """Called by Ray with the local checkpoint and the name that all ranks agreed on.

    Raises ckptsync's errors: the report fails, and with it the worker, as it does where Ray's own upload fails.
    """

    store: str
    run: str = ""
    patience: float = 600.0

    def __call__(self, checkpoint: Any, name: str) -> Any:
        """The checkpoint that Ray keeps."""
        from ray import train  # noqa: PLC0415

        context = train.get_context()
        storage = context.get_storage()
        part = Part(self.run or context.get_experiment_name(), name, context.get_world_rank(), self.patience)
        with checkpoint.as_directory() as local:
            note = send(Path(local), self.store, part)
        folder = storage.build_checkpoint_path_from_name(name)
        ray_note.write(storage.storage_filesystem, folder, note)
        return train.Checkpoint(folder, storage.storage_filesystem)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of the checkpoint ``name`` of ``run``."""

    run: str
    name: str
    rank: int
    patience: float = 600.0


def send(directory: Path, url: str, part: Part) -> Note:
    """Send what lies in it, and say where it is.

    Ranks of one node are nodes of their own to the store: each has a directory of its own, and where two have other bytes under one name none is lost.
    All ranks' parts have one id of the save, so they belong together for certain.  Raises ConfigError, Incomplete, StoreError.
    """
    run = checked_run(part.run)
    _check_name(part.name)
    access, place = reached(), located(url)
    if isinstance(place, Path) and str(place) != url.removeprefix("file://"):
        raise ConfigError(
            f"{url}: a relative path, and Ray's workers have directories of their own", hint="give the store's full path"
        )
    store = create_store(url, access.options_of(place) if isinstance(place, Remote) else {}, access.limits)
    spot = scan.Spot(part.name, scan.family_of(part.name), directory)
    offer = Offer(run, directory, (spot,), save=save_id(run, part.name, 0))
    sent = _sent(offer, store, part, access.limits.threads)
    return Note(str(place) if not isinstance(place, Remote) else place.url, run, part.name, sent.place or part.name)


def _check_name(name: str) -> None:
    if not ray_note.is_plain(name) or name in (scan.FINAL, *scan.NESTED, CONSOLIDATED):
        hint = "give checkpoint_dir_name= one of letters, digits, '.', '_' and '-'"
        raise ConfigError(f"{name!r}: no name that a store can keep a checkpoint under", hint=hint)


def _sent(offer: Offer, store: Store, part: Part, threads: int) -> Progress:
    """Again while another rank writes a file of the same name, or this rank's own writing has not ended."""
    node = checked_node(f"{node_id()[:80]}.rank-{part.rank}")
    until = time.monotonic() + part.patience
    while True:
        with contextlib.suppress(Incomplete) if time.monotonic() < until else contextlib.nullcontext():
            return push_offer(offer, store, node, threads=threads)[0]
        time.sleep(_AGAIN)


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
    place = located(note.store)
    store = open_store(note.store, access.options_of(place) if isinstance(place, Remote) else {}, access.limits)
    found = ordered(store, Asked(f"{note.run}/{note.place}", "any"))
    pulled = carry_out(store, Landing(home, found.order), threads=access.limits.threads)
    lacking = [*found.order.lacking, *(f"{path}: {error}" for path, error in sorted(pulled.failed.items()))]
    if lacking:
        raise Incomplete(
            f"{note.url}: not all of it can be had: {'; '.join(lacking[:3])}", hint="`ckptsync verify` says what is damaged"
        )
    return pulled.where


def reached() -> Access:
    """How stores are reached, as this process's environment says (docs/cli.md); raises ConfigError."""
    options, asked = from_environment()
    return Access(options, reach.limits(asked))
