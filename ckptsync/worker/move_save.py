"""Move a stored save of this node to where all manifests together put it.

Writers cannot lock a store, so a location, or the name of a file, may turn out to be another save's
once all manifests are known.  Each step stores files, then a further manifest of this node; nothing
is deleted, since a worker may not be allowed to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckptsync.records import save_groups
from ckptsync.records.io import next_number
from ckptsync.records.manifest import FileEntry
from ckptsync.records.save_groups import Known
from ckptsync.records.upload_decision import list_doubtful_names, list_unsent
from ckptsync.worker.local_save import LocalFiles
from ckptsync.worker.upload import FileSender, UploadContext
from ckptsync.worker.upload_sources import is_stored


def correct_location(node: str, location: str, files: LocalFiles, to: UploadContext) -> str:
    """See that a stored save lies in the location where all manifests that are known now put it.

    Return its location afterwards. ``node``: whose part it is; ``to.node`` is who moves it, mostly
    the same.  While another node sends files of that checkpoint, nothing moves: a later call does
    it.
    """
    known = to.read().known  # of most saves nothing has to move, and nothing is announced for them
    home = save_groups.better_location(node, location, known)
    is_exclusive = to.store.is_exclusive
    if home == location and not list_doubtful_names(
        node, location, known, is_exclusive=is_exclusive
    ):
        return location
    sender = FileSender(files, to)
    with sender.announce():
        # once this node has announced itself, either it sees that another node sends, or that node
        # sees this one
        is_contended = to.read().is_contended
        # after that: a node that has ended meanwhile has its manifest among those read now
        known = to.read().known
        home = save_groups.better_location(node, location, known)
        if home != location and not is_contended:
            _move(node, location, home, known, sender)
            location, known = home, to.read().known  # with the manifest written there
        _store_beside(node, location, known, sender)
    return location


def _move(node: str, location: str, home: str, known: Sequence[Known], sender: FileSender) -> None:
    """Store at home what a node has in another location, and write a manifest there."""
    mine, there = _own(node, location, known), save_groups.counting(home, known)
    number = next_number((k.name for k in known), home, "manifest", node)
    manifest = save_groups.moved(mine, home, number)
    sender.elsewhere = [*save_groups.counting(location, known), *there]
    lies = {f.path: f for m in there if m.node == node for f in m.files}
    lies |= {f.path: f for f in sender.send(manifest, list_unsent(manifest, there))}
    files = tuple(replace(f, stored_as=lies[f.path].stored_as) for f in manifest.files)
    sender.to.commit(replace(manifest, files=files))


def _store_beside(node: str, location: str, known: Sequence[Known], sender: FileSender) -> None:
    """Store under the node's own name the files that another node wrote over, or names too.

    That makes a further manifest. The smallest node id keeps a name that several claim, if its
    bytes are there.
    """
    is_exclusive = sender.to.store.is_exclusive
    names = list_doubtful_names(node, location, known, is_exclusive=is_exclusive)
    if not names:
        return
    here, mine = save_groups.counting(location, known), _own(node, location, known)
    lying = {at.name: at.entry.digest for its in save_groups.locate(here).values() for at in its}
    number = next_number((k.name for k in known), location, "manifest", node)
    manifest = save_groups.moved(mine, location, number)
    sender.elsewhere = here

    def is_well(file: FileEntry) -> bool:
        name = manifest.stored_name(file)
        return name not in names or (
            lying[name] == file.digest
            and bool(is_stored(sender.to.store, name, file, sender.to.after_chunk))
        )

    files = tuple(f if is_well(f) else sender.put_beside(manifest, f) for f in manifest.files)
    if files != manifest.files:
        sender.to.commit(replace(manifest, files=files))


def _own(node: str, location: str, known: Iterable[Known]) -> list[Known]:
    place = (node, location)
    return [k for k in save_groups.live(known) if (k.manifest.node, k.manifest.location) == place]
