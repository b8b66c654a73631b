"""``upload_fn``: a Ray worker's local checkpoint goes to the store, as this rank's part of it.

Ray Train 2.60 demands of a ``checkpoint_upload_fn`` a ``Checkpoint`` in the experiment's directory, the same path on every rank (``checkpoint_manager.py``,
``report_handler.py``): it gets one that holds a note of the location (`ckptsync.hooks.ray_note`).  The bytes do not go through ``storage_path``.

What is sent is safe before ``report`` goes on: the manifest is the last that is written, and Ray is told of the checkpoint when every rank's is there.  Killed
before, it is no checkpoint to Ray, and nothing half sent counts in the store.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsync import scan
from ckptsync.errors import ConfigError, Incomplete
from ckptsync.hooks import ray_note
from ckptsync.hooks.ray_bring import reached
from ckptsync.hooks.ray_note import Note
from ckptsync.records.names import CONSOLIDATED, checked_node
from ckptsync.spool.marks import save_id
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import Listing, walk
from ckptsync.worker.node import node_id
from ckptsync.worker.options import checked_run
from ckptsync.worker.push import ASSUMED, Offer, push_offer
from ckptsync.worker.result import Progress

_log = logging.getLogger("ckptsync.hook")
_AGAIN = 1.0  # seconds
_reported: dict[tuple[str, ...], int] = {}  # of what this process has sent, by name: a hash of names, sizes and times


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
        run = self.run or context.get_experiment_name().replace("/", "-")  # in a store a run is one directory
        part = Part(run, name, context.get_world_rank(), self.patience, _attempt())
        with checkpoint.as_directory() as local:
            note = send(Path(local).resolve(), self.store, part)  # a link to the directory is the user's own word
        folder = storage.build_checkpoint_path_from_name(name)
        if note is not None:
            ray_note.write(storage.storage_filesystem, folder, note)
        return train.Checkpoint(folder, storage.storage_filesystem)


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of the checkpoint ``name`` of ``run``.

    ``attempt``: the same on all ranks, another each time that they are begun again.  A rank that is killed leaves parts of the others in the store, and the
    next attempt may write other bytes under the same name: without it the two were one save, of which nobody could say what belongs to it.
    """

    run: str
    name: str
    rank: int
    patience: float = 600.0
    attempt: str = ""


def _attempt() -> str:
    """Ray makes a placement group for each worker group (``worker_group.py``, ``_create_placement_group``)."""
    from ray.util import get_current_placement_group  # noqa: PLC0415

    group = get_current_placement_group()
    return str(group.id.hex()) if group is not None else ""


def send(directory: Path, url: str, part: Part) -> Note | None:
    """Send what lies in it, and say where it is; ``None`` for a rank that has written nothing.

    Ranks of one node are nodes of their own to the store: each has a directory of its own, and where two have other bytes under one name none is lost.
    All ranks' parts have one id of the save, so they belong together for certain.  Raises ConfigError, Incomplete, StoreError.
    """
    run = checked_run(part.run)
    _check_name(part.name)
    access, location = reached(), located(url)
    if isinstance(location, Path) and not Path(url.removeprefix("file://")).is_absolute():
        raise ConfigError(
            f"{url}: a relative path, and Ray's workers have directories of their own", hint="give the store's full path"
        )
    listing = _looked_at(directory)
    if not (listing.files or listing.partial):
        return None
    key = (url, run, part.name, str(part.rank), part.attempt)
    _check_is_no_other(key, listing)
    store = create_store(url, access.options_of(location) if isinstance(location, Remote) else {}, access.limits)
    spot = scan.Spot(part.name, scan.family_of(part.name), directory)
    offer = Offer(run, directory, (spot,), save=save_id(f"{run}\0{part.attempt}", part.name, 0))
    sent = _sent(offer, store, part, access.limits.threads)
    _reported[key] = _told(walk(directory))
    for text in (*(f"{f.path} is not sent: it has a name of unfinished files" for f in listing.partial), *sent.notes):
        if not text.startswith(ASSUMED):  # a report is that word
            _log.warning("ckptsync: %s: %s", directory, text)
    return Note(str(location) if not isinstance(location, Remote) else location.url, run, part.name, sent.location or part.name)


def _check_name(name: str) -> None:
    if not ray_note.is_plain(name) or name in (scan.FINAL, *scan.NESTED, CONSOLIDATED):
        hint = "give checkpoint_dir_name= one of letters, digits, '.', '_' and '-'"
        raise ConfigError(f"{name!r}: no name that a store can keep a checkpoint under", hint=hint)


def _looked_at(directory: Path) -> Listing:
    """What is there; a directory with nothing in it is a rank's that has written nothing."""
    if not directory.is_dir():
        hint = "with checkpoint_upload_mode=ASYNC it must stay until then: delete_local_checkpoint_after_upload=True deletes it in time"
        raise Incomplete(f"{directory}: gone before it was sent", hint=hint)
    listing = walk(directory)
    if listing.others and not listing.files:
        raise ConfigError(f"{directory}: {listing.others[0]} is a link, which is not followed, and nothing else is there")
    return listing


def _check_is_no_other(key: tuple[str, ...], listing: Listing) -> None:
    """The same may be sent again, as Ray does after some errors of its storage; other files of the same name would make one save of two."""
    if key in _reported and _reported[key] != _told(listing):
        hint = "give checkpoint_dir_name= another one for each report, as Ray demands: with the step in it"
        raise ConfigError(f"{key[2]!r}: reported before, with other files", hint=hint)


def _told(listing: Listing) -> int:
    return hash(tuple((f.path, f.size, f.mtime) for f in listing.files))


def _sent(offer: Offer, store: Store, part: Part, threads: int) -> Progress:
    """Push a part, and push it again while this rank's own writing has not ended."""
    node = checked_node(f"{node_id()[:80]}.rank-{part.rank}")
    until = time.monotonic() + part.patience
    while True:
        _looked_at(offer.root)
        try:
            return push_offer(offer, store, node, threads=threads)[0]
        except Incomplete:
            if time.monotonic() >= until:
                raise
        time.sleep(_AGAIN)
