"""Pins: second names for a checkpoint's files, which rotation does not delete.

A worker that uploads for hours needs the bytes longer than the trainer keeps them.  A pin holds
them by hard links, and appears and disappears by one rename, so a reader never sees half of one.

In <output_dir>/_ckptsync/pins/<checkpoint>.<k>/:

    owner.json    the node that uploads it, and the pin's id; the owner renews its mtime
    files/…       hard links, reflinks, or copies
    added/…       what the hook adds to the trainer's own files
    commit.json   the hook's marker that it is whole: `ckptsync.spool.markers`
    notes.json    what the worker's manifest says of it
    stored        a manifest in the store names it, as long as its files are those of this digest

Everything here may be deleted at any moment; that costs time, and files that rotation has deleted.
Nothing is ever written in a checkpoint's own directory.  A worker's pin appears with its owner in
it, so that exactly one node has it; the hook's appears with its commit, and without an owner until
the first worker, whatever its node id, adopts it.

A path is used again after its pin was deleted, and an uploading thread holds a `Pin` for hours. So
a function that changes a pin compares the pin's id, or the hook's commit if it has no id yet.

A hard link follows a file that is still being written, and is overwritten with it; a reflink is
not.  So files are linked as they appear (`link_files`), and cloned once the save is finished
(`replace_links`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.spool import safe_files
from ckptsync.spool.markers import (
    COMMIT,
    NOTES,
    Commit,
    PinNotes,
    load_json,
    read_marker_in,
)
from ckptsync.spool.safe_files import (
    NO_LINKS,
    Tree,
    create_copy,
    link,
    list_paths,
    open_folder,
    open_folder_in,
    remove,
    translate_errors,
    try_rename,
    unlink,
    write_json,
)
from ckptsync.walk import SPOOL, Stat, open_checkpoint_file, opened_parent, stat_open, walk

# seconds: no hook that is alive leaves a draft unchanged for so long
_ABANDONED_AFTER = 6 * 3600.0
_HALF_DONE = re.compile(r"\.(new|gone)-.+", re.DOTALL)
_CLAIM = re.compile(r"\.claim-([^@]+)@(.+)\.[0-9]{1,9}", re.DOTALL)
_NAME = re.compile(r"(.+)\.([0-9]{1,9})")
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # `ckptsync.records.store_paths.checked_node`
_NOTHING = PinNotes()


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin, as it was when it was read.

    ``files`` lie below `root`, ``added`` below `added_root`.  ``node``: its owner, which sends it;
    empty without one.  ``renewed``: when the owner last showed that it is alive (ns, the file
    system's clock).  ``stored``: a manifest of these files is in the store.  ``id``: unique; empty
    without an owner, and in spools of earlier versions.
    """

    checkpoint: str
    k: int
    node: str
    renewed: int
    path: Path
    files: tuple[Stat, ...] = ()
    commit: Commit | None = None
    notes: PinNotes = _NOTHING
    added: tuple[Stat, ...] = ()
    stored: bool = False
    id: str = ""

    @property
    def root(self) -> Path:
        """Return the directory of the pinned files, which have their own names there."""
        return self.path / "files"

    @property
    def added_root(self) -> Path:
        """Return the directory of the files that the hook added."""
        return self.path / "added"

    @property
    def is_committed(self) -> bool:
        """Return whether its files have the sizes and times that the hook committed.

        False without a commit, and after a file was overwritten in place.
        """
        return (
            self.commit is not None
            and {f.path: (f.size, f.mtime) for f in self.files} == self.commit.files
        )


@dataclass(frozen=True, slots=True)
class PinDifference:
    """How a pin's files differ from their source's, by name.

    ``same``: one file under both names. ``changed``: another file. ``new``: only in the source.
    ``vanished``: only in the pin.
    """

    same: tuple[str, ...]
    changed: tuple[str, ...]
    new: tuple[str, ...]
    vanished: tuple[str, ...]


def compare(pinned: Iterable[Stat], source: Iterable[Stat]) -> PinDifference:
    """Return how a pin differs from its source; every name is in exactly one of the four."""
    pinned_stats, source_stats = {s.path: s for s in pinned}, {s.path: s for s in source}
    both = sorted(pinned_stats.keys() & source_stats.keys())
    return PinDifference(
        tuple(p for p in both if pinned_stats[p].is_file_of(source_stats[p])),
        tuple(p for p in both if not pinned_stats[p].is_file_of(source_stats[p])),
        tuple(sorted(source_stats.keys() - pinned_stats.keys())),
        tuple(sorted(pinned_stats.keys() - source_stats.keys())),
    )


def list_pins(
    output_dir: Path, is_wanted: Callable[[str], bool] = lambda _: True
) -> tuple[Pin, ...]:
    """Return the pins of an output directory by checkpoint and number.

    Empty without a spool.  ``is_wanted``: whether to read the pins of a checkpoint of this name.
    Raises UnsafeSpool, or StoreError or ConfigError if they cannot be listed.
    """
    folder, pins = output_dir / SPOOL / "pins", list[Pin]()
    with contextlib.suppress(Incomplete), translate_errors(folder), open_folder(folder) as fd:
        for path in (folder / name for name in safe_files.list_names_in(fd)):
            if is_wanted(_split_name(path)[0]) and (pin := _load_pin(path, fd)) is not None:
                pins.append(pin)
    return tuple(sorted(pins, key=lambda p: (p.checkpoint, p.k)))


def create_pin(output_dir: Path, checkpoint: str, k: int, node: str) -> Pin | None:
    """Create an empty pin owned by ``node`` and return it; None if another process was first.

    Makes the directory of pins if it is missing, and removes a draft of an earlier try.  Raises
    Incomplete if the output directory is gone, StoreError or ConfigError where the disk refuses.
    """
    folder = output_dir / SPOOL / "pins"
    with translate_errors(folder):
        safe_files.make_folders(folder)
        draft = folder / f".new-{node}-{checkpoint}"
        remove(draft)
        safe_files.make_new_folder(draft)
        _write_owner(draft, node)
        return (
            _read_pin(folder / f"{checkpoint}.{k}")
            if try_rename(draft, folder / f"{checkpoint}.{k}")
            else None
        )


def publish(output_dir: Path, checkpoint: str, draft: Path) -> Path:
    """Rename a complete directory beside the pins to the newest pin of a checkpoint.

    Return its path; its number is above all others, from 0 on.  Raises Incomplete if ``draft`` does
    not exist any more, StoreError where the disk refuses.
    """
    folder = output_dir / SPOOL / "pins"
    with translate_errors(draft):
        k = (
            max(
                (k for name, k in map(_split_name, list_paths(folder)) if name == checkpoint),
                default=-1,
            )
            + 1
        )
        while not try_rename(draft, folder / f"{checkpoint}.{k}"):
            if safe_files.status(draft) is None:
                raise FileNotFoundError(errno.ENOENT, "gone", str(draft))
            k += 1
        return folder / f"{checkpoint}.{k}"


def adopt(pin: Pin, node: str) -> Pin | None:
    """Make this node the owner of a pin without one, and return it.

    None if another node was first, or the pin does not exist any more.  Raises StoreError or
    ConfigError where the disk refuses; then the pin may still have no owner.
    """
    mark = pin.path / f".owner-{node}"
    with contextlib.suppress(Incomplete), translate_errors(pin.path), open_folder(pin.path) as fd:
        _write_owner(pin.path, node, mark.name)
        try:
            safe_files.link(fd, mark.name, fd, "owner.json")
        except OSError as e:
            if isinstance(e, FileExistsError) and _read_owner(fd)[0]:
                return None
            if e.errno not in (errno.EEXIST, errno.EPERM, *NO_LINKS):
                raise
            # no links here, or an owner that a crash left torn: a rename is exclusive, too
            return claim(pin, node)
        finally:
            safe_files.unlink(mark)
        return _read_pin(pin.path)
    return None


def claim(pin: Pin, node: str) -> Pin | None:
    """Make this node the owner of a dead node's pin, and return it.

    The pin gets a new id.  None if another node was first, or the pin does not exist any more.
    Raises StoreError or ConfigError where the disk refuses; the old owner stays then.
    """
    claimed = pin.path.with_name(f".claim-{node}@{pin.path.name}")
    with translate_errors(pin.path):
        if not try_rename(pin.path, claimed):
            return None
        try:
            _write_owner(claimed, node)
        finally:  # a full disk is no reason to keep it out of sight
            is_back = try_rename(claimed, pin.path)
        return _read_pin(pin.path) if is_back else None


def write_pin_notes(pin: Pin, notes: PinNotes) -> PinNotes:
    """Add times and id to a pin's notes; return all its notes.

    What was noted before stays, but ``stable`` is replaced unless the new one is 0, since files may
    have come later.  Raises Incomplete if the pin does not exist any more, StoreError where the
    disk refuses.
    """
    with _open_same_pin(pin) as fd:
        before = read_marker_in(fd, NOTES, PinNotes) or _NOTHING
        old, new = dataclasses.asdict(before), dataclasses.asdict(notes)
        merged = {key: value or new[key] for key, value in old.items()} | {
            "stable": new["stable"] or old["stable"]
        }
        if merged != old:
            safe_files.write_in(fd, NOTES, json.dumps(merged).encode() + b"\n")
        return PinNotes(**merged)


def mark_stored(pin: Pin) -> None:
    """Write in a pin that a manifest names its files, for hooks and for the spool's budget.

    The mark is void once a file is overwritten in place.  Does nothing if ``pin.stored`` is set.
    Raises Incomplete if the pin does not exist any more, StoreError where the disk refuses.
    """
    if not pin.stored:
        with _open_same_pin(pin) as fd:
            safe_files.write_in(fd, "stored", _digest(pin.files))


def _digest(files: Iterable[Stat]) -> bytes:
    """Return a digest of names, sizes and times of files, whatever their order."""
    lines = "\n".join(f"{f.path}\0{f.size}\0{f.mtime}" for f in sorted(files))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest().encode()


def _is_stored(pin: int, files: Iterable[Stat]) -> bool:
    """Return whether an open pin was marked as stored with exactly these files.

    An empty mark, of earlier versions, counts for any files; one that cannot be read is none.
    """
    try:
        mark = safe_files.read_in(pin, "stored")
    except (OSError, CkptsyncError):
        return False
    return mark in (b"", _digest(files))  # empty: of earlier versions


def drop(pin: Pin, during: contextlib.AbstractContextManager[object] | None = None) -> None:
    """Delete a pin: rename it out of sight, then remove its files.  A later pin at its path stays.

    Does nothing if the pin does not exist any more.  ``during``: a lock that is held for the rename
    only.  Raises StoreError or ConfigError where the disk refuses.
    """
    hidden = pin.path.with_name(f".gone-{pin.node}-{pin.path.name}")
    with translate_errors(pin.path):
        remove(hidden)
        with (
            during or contextlib.nullcontext(),
            contextlib.suppress(Incomplete),
            _open_same_pin(pin),
        ):
            try_rename(pin.path, hidden)
        remove(hidden)


def renew_ownership(pin: Pin) -> None:
    """Set the mtime of a pin's owner file to now: other nodes see that the owner is alive.

    Does nothing if the pin does not exist any more.  Raises StoreError or ConfigError where the
    disk refuses.
    """
    # `_ckptsync` may be deleted at any moment
    with contextlib.suppress(Incomplete), translate_errors(pin.path):
        safe_files.touch(pin.path / "owner.json")


def link_files(pin: Pin, source: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Link files of ``source`` into a pin; return the names that this file system cannot link.

    Files that are gone or pinned already are skipped.  The pin's notes and its mark of being stored
    are removed unless all are refused.  Raises ConfigError where files belong to another user,
    StoreError where the disk refuses.
    """
    refused = []
    has_linked = False
    with translate_errors(pin.path), Tree(pin.root) as tree:
        for name in names:
            if not link_file(tree, source, name):
                refused.append(name)
            elif not has_linked:
                _remove_notes(pin)
                has_linked = True
    return tuple(refused)


def unlink_files(pin: Pin, names: Iterable[str]) -> None:
    """Remove names from a pin, and the pin's notes and stored mark.

    For files that the trainer itself has removed.  What is gone is skipped, the pin, too.  Raises
    StoreError or ConfigError where the disk refuses.
    """
    with translate_errors(pin.path):
        _remove_notes(pin)
        for name in names:
            unlink(pin.root / name)


def _remove_notes(pin: Pin) -> None:
    """Remove the notes and the stored mark of a pin whose files are about to change."""
    for name in ("stored", NOTES):
        unlink(pin.path / name)


def link_file(tree: Tree, source: Path, name: str) -> bool:
    """Link a file into a pin; return False where the file system has no hard links.

    ``name``: its path in ``source``.  True also if the file is gone or already pinned.  Raises
    ConfigError for another user's file, or where access is refused; other OSErrors as they are.
    """
    target, new = tree.place(name)
    try:
        with opened_parent(source, name) as (parent, last):
            link(parent, last, target, new)
    except (FileNotFoundError, FileExistsError, Incomplete):
        # rotation was quicker, or it is pinned already
        return True
    except OSError as e:
        if e.errno in NO_LINKS:
            return False
        if e.errno not in (errno.EPERM, errno.EACCES):
            raise
        # of a file of our own: the file system has no links (vfat, some FUSE)
        if e.errno == errno.EPERM:
            try:
                if (source / name).lstat().st_uid == os.geteuid():
                    return False
            except FileNotFoundError:
                return False  # whose it was does not matter
        raise ConfigError(
            f"{source}/{name}: may not be linked by uid {os.geteuid()}, which does not own it",
            hint=(
                "run the worker as the user who trains (fs.protected_hardlinks refuses everyone"
                " else)"
            ),
        ) from e
    return True


def replace_links(pin: Pin) -> None:
    """Replace a pin's hard links by reflinks.

    Later writes to the source then leave the pin as it is.  A file stays a link if it changes
    meanwhile.  At the first refusal (no reflinks here, a full disk) all further files stay links.
    Raises Incomplete if a file is gone, ConfigError where this user may not write.
    """
    for file in pin.files:
        fd = open_checkpoint_file(pin.root, file.path)
        try:
            with (
                translate_errors(pin.path),
                Tree(pin.root) as tree,
                create_copy(fd, pin.path, *tree.place(file.path)) as out,
            ):
                safe_files.clone(fd, out.fileno())
                os.utime(out.fileno(), ns=(file.mtime, file.mtime))
                # it changed meanwhile and stays a link: `harden_save` will notice
                if stat_open(fd, file.path) != file:
                    out.close()
        except StoreError:
            return  # a file system without reflinks; links do
        finally:
            os.close(fd)


def clean_own(output_dir: Path, node: str) -> None:
    """Finish or remove what a killed worker of this node left half done.

    Drafts, half removed pins, and half copied files in this node's pins are removed.  A pin that
    was being claimed is published: its files may be the last ones.  What other nodes left six hours
    ago is treated alike.  Call it before anything else of the same node runs.  Raises StoreError or
    ConfigError.
    """
    for path in list_paths(output_dir / SPOOL / "pins"):
        claim_match = _CLAIM.fullmatch(path.name)
        if claim_match and claim_match[1] == node:
            with contextlib.suppress(Incomplete), translate_errors(path):
                _write_owner(path, node)
                publish(output_dir, claim_match[2], path)
        elif path.name.startswith((f".new-{node}-", f".gone-{node}-")):
            with translate_errors(path):
                remove(path)
    for path in (
        path for pin in list_pins(output_dir) if pin.node == node for path in list_paths(pin.path)
    ):
        if path.name.startswith(safe_files.DRAFT_PREFIX):  # a copy that was cut short
            with translate_errors(path):
                remove(path)
    clean_abandoned(output_dir, time.time())


def clean_abandoned(output_dir: Path, now: float) -> None:
    """Remove or publish what other nodes left half done six hours ago or earlier.

    ``now``: seconds since the epoch.  What cannot be removed stays, without an error.  Raises as
    `list_paths` if the pins cannot be listed.
    """
    for path in list_paths(output_dir / SPOOL / "pins"):
        claim_match = _CLAIM.fullmatch(path.name)
        if not (claim_match or _HALF_DONE.fullmatch(path.name)):
            continue
        with contextlib.suppress(CkptsyncError), translate_errors(path):  # another user's, or gone
            if now - safe_files.last_change(path) < _ABANDONED_AFTER:  # a copy grows
                continue
            if claim_match:
                # if its owner does not renew it, it is claimed again
                publish(output_dir, claim_match[2], path)
            else:
                remove(path)


def free_bytes(output_dir: Path) -> int:
    """Return the free bytes of the file system of the pins, nearly always the trainer's disk.

    Raises Incomplete if the output directory is gone, else as `translate_errors`.
    """
    with translate_errors(output_dir):
        try:
            with open_folder(output_dir / SPOOL) as fd:
                disk = os.fstatvfs(fd)
        except FileNotFoundError:
            disk = os.statvfs(output_dir)
        return disk.f_bavail * disk.f_frsize


def _load_pin(path: Path, above: int) -> Pin | None:
    """Return the pin at a path in the open directory of pins.

    None if it is none, or was deleted.  Without an owner, ``renewed`` is the directory's mtime.
    Raises StoreError or ConfigError if it cannot be read.
    """
    checkpoint, k = _split_name(path)
    if k < 0:
        return None
    with contextlib.suppress(Incomplete), translate_errors(path), open_folder_in(above, path) as fd:
        node, pin_id = _read_owner(fd)
        files = safe_files.status_in(fd, "files")
        if not node and (files is None or not stat.S_ISDIR(files.st_mode)):
            return None  # dropped meanwhile, or not of our making
        mark = safe_files.status_in(fd, "owner.json") if node else os.fstat(fd)
        if mark is None:
            return None
        files_stat = walk(path / "files", above=fd).files
        return Pin(
            checkpoint,
            k,
            node,
            mark.st_mtime_ns,
            path,
            files_stat,
            read_marker_in(fd, COMMIT, Commit),
            read_marker_in(fd, NOTES, PinNotes) or _NOTHING,
            walk(path / "added", above=fd).files,
            _is_stored(fd, files_stat),
            pin_id,
        )
    return None  # dropped meanwhile


def _read_pin(path: Path) -> Pin | None:
    """Return the pin at a path; None if there is none.  Raises as `_load_pin` does."""
    with (
        contextlib.suppress(Incomplete),
        translate_errors(path.parent),
        open_folder(path.parent) as fd,
    ):
        return _load_pin(path, fd)
    return None


def _split_name(path: Path) -> tuple[str, int]:
    """Return checkpoint and number of a pin by its name; number -1 for any other directory."""
    match = None if path.name.startswith(".") else _NAME.fullmatch(path.name)
    return (match[1], int(match[2])) if match else (path.name, -1)


@contextlib.contextmanager
def _open_same_pin(pin: Pin) -> Iterator[int]:
    """Open a pin's directory and yield its descriptor.

    Raises Incomplete if the pin does not exist any more, also if a later pin has its path.
    """
    with translate_errors(pin.path), open_folder(pin.path) as fd:
        is_same = (
            _read_owner(fd)[1] == pin.id
            if pin.id
            else read_marker_in(fd, COMMIT, Commit) == pin.commit
        )
        if not is_same:
            raise FileNotFoundError(errno.ENOENT, "dropped", str(pin.path))
        yield fd


def _read_owner(folder: int) -> tuple[str, str]:
    """Return node and id of an open pin's owner; both empty without one, or in a torn file."""
    owner = load_json(folder, "owner.json")
    values = (owner.get("node"), owner.get("id", "")) if isinstance(owner, dict) else ("", "")
    node, pin_id = (x if isinstance(x, str) and _NODE.fullmatch(x) else "" for x in values)
    return (node, pin_id) if node else ("", "")


def _write_owner(folder: Path, node: str, name: str = "owner.json") -> None:
    """Write a node as the owner of a pin's directory, with a new id.  Raises OSError."""
    write_json(folder, name, {"node": node, "id": secrets.token_hex(8)})
