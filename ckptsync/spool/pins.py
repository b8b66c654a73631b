"""Pins: names of our own for a checkpoint's files, which rotation does not delete.

The trainer's rotation deletes only the trainer's own names.

In <output_dir>/_ckptsync/pins/<checkpoint>.<k>/:

    owner.json    the node that uploads it, and the pin's id; its mtime is the owner's pulse
    files/…       hard links, reflinks, or copies
    added/…       what the hook adds to the trainer's own files
    commit.json   the hook's marker that it is whole: `ckptsync.spool.markers`
    notes.json    what the worker's manifest says of it
    stored        a manifest in the store names it, as long as its files are those of this digest

Everything here may be deleted at any moment: what is lost is time, and what rotation has deleted.
Nothing is ever written in a checkpoint's own directory.  A pin appears by one rename: a worker's
with its owner in it, so that exactly one node has it; the hook's with its commit, and with no owner
until the first worker, whatever its node id, adopts it.

A path is used again once its pin was dropped, and a thread that uploads holds a `Pin` for hours.
So who changes a pin later than the scan compares its id, or the hook's commit while it has none.

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

# seconds: no commit, and no copying for one, stands still for so long
_ABANDONED_AFTER = 6 * 3600.0
_HALF_DONE = re.compile(r"\.(new|gone)-.+", re.DOTALL)
_CLAIM = re.compile(r"\.claim-([^@]+)@(.+)\.[0-9]{1,9}", re.DOTALL)
_NAME = re.compile(r"(.+)\.([0-9]{1,9})")
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # `ckptsync.records.store_paths.checked_node`
_NOTHING = PinNotes()


@dataclass(frozen=True, slots=True)
class Pin:
    """``files`` lie below `root`, ``added`` below `beside`.

    ``node``: who sends it, empty while it is nobody's. ``renewed`` (ns, the file system's clock)
    changes as long as ``node`` is alive.  ``stored``: a manifest of these files is in the store.
    ``id``: no other pin has it; empty without an owner, and in spools of earlier versions.
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
        """Return where the pinned files lie, under their own names."""
        return self.path / "files"

    @property
    def beside(self) -> Path:
        """Return where the files lie that the hook added."""
        return self.path / "added"

    @property
    def is_committed(self) -> bool:
        """Return whether it holds the files that the hook committed.

        That is not so if a file was overwritten in place since.
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
    ours, theirs = {s.path: s for s in pinned}, {s.path: s for s in source}
    both = sorted(ours.keys() & theirs.keys())
    return PinDifference(
        tuple(p for p in both if ours[p].is_file_of(theirs[p])),
        tuple(p for p in both if not ours[p].is_file_of(theirs[p])),
        tuple(sorted(theirs.keys() - ours.keys())),
        tuple(sorted(ours.keys() - theirs.keys())),
    )


def list_pins(output_dir: Path, wanted: Callable[[str], bool] = lambda _: True) -> tuple[Pin, ...]:
    """Return every pin in an output directory, by checkpoint and number.

    Only those whose checkpoint's name ``wanted`` accepts.
    """
    folder, pins = output_dir / SPOOL / "pins", list[Pin]()
    with contextlib.suppress(Incomplete), translate_errors(folder), open_folder(folder) as fd:
        for path in (folder / name for name in safe_files.list_names_in(fd)):
            if wanted(_split_name(path)[0]) and (pin := _load_pin(path, fd)) is not None:
                pins.append(pin)
    return tuple(sorted(pins, key=lambda p: (p.checkpoint, p.k)))


def create_pin(output_dir: Path, checkpoint: str, k: int, node: str) -> Pin | None:
    """Return a new empty pin of this node; ``None`` if another was first."""
    folder = output_dir / SPOOL / "pins"
    with translate_errors(folder):
        safe_files.make_folders(folder)
        fresh = folder / f".new-{node}-{checkpoint}"
        remove(fresh)
        safe_files.make_new_folder(fresh)
        _write_owner(fresh, node)
        return (
            _read_pin(folder / f"{checkpoint}.{k}")
            if try_rename(fresh, folder / f"{checkpoint}.{k}")
            else None
        )


def publish(output_dir: Path, checkpoint: str, fresh: Path) -> Path:
    """Make a whole directory beside the pins the newest pin of a checkpoint, by one rename.

    Return where it is now. Raises Incomplete if ``fresh`` has gone, StoreError where the disk
    refuses.
    """
    folder = output_dir / SPOOL / "pins"
    with translate_errors(fresh):
        k = (
            max(
                (k for name, k in map(_split_name, list_paths(folder)) if name == checkpoint),
                default=-1,
            )
            + 1
        )
        while not try_rename(fresh, folder / f"{checkpoint}.{k}"):
            if safe_files.status(fresh) is None:
                raise FileNotFoundError(errno.ENOENT, "gone", str(fresh))
            k += 1
        return folder / f"{checkpoint}.{k}"


def adopt(pin: Pin, node: str) -> Pin | None:
    """Return a pin that had no owner, with this node as its owner.

    ``None`` if another was first, or it has gone.
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
    """Return the pin of a dead node, with this node as its owner.

    ``None`` if another was first, or it has gone.
    """
    taken = pin.path.with_name(f".claim-{node}@{pin.path.name}")
    with translate_errors(pin.path):
        if not try_rename(pin.path, taken):
            return None
        try:
            _write_owner(taken, node)
        finally:  # a full disk is no reason to keep it out of sight
            is_back = try_rename(taken, pin.path)
        return _read_pin(pin.path) if is_back else None


def write_pin_notes(pin: Pin, noted: PinNotes) -> PinNotes:
    """Note in a pin when it was finished and sent; return all notes: what was noted once stays.

    Raises Incomplete if the pin has gone. ``stable`` is noted anew when files have come later.
    """
    with _open_same_pin(pin) as fd:
        before = read_marker_in(fd, NOTES, PinNotes) or _NOTHING
        old, new = dataclasses.asdict(before), dataclasses.asdict(noted)
        merged = {key: value or new[key] for key, value in old.items()} | {
            "stable": new["stable"] or old["stable"]
        }
        if merged != old:
            safe_files.write_in(fd, NOTES, json.dumps(merged).encode() + b"\n")
        return PinNotes(**merged)


def mark_stored(pin: Pin) -> None:
    """Note, for hooks and the spool's budget, that a manifest names this pin's files.

    The note is void once a file is overwritten in place.  Raises Incomplete if the pin has gone.
    """
    if not pin.stored:
        with _open_same_pin(pin) as fd:
            safe_files.write_in(fd, "stored", _digest(pin.files))


def _digest(files: Iterable[Stat]) -> bytes:
    lines = "\n".join(f"{f.path}\0{f.size}\0{f.mtime}" for f in sorted(files))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest().encode()


def _is_stored(pin: int, files: Iterable[Stat]) -> bool:
    """Return whether an open pin was marked as stored, and these are the files of that time."""
    try:
        mark = safe_files.read_in(pin, "stored")
    except (OSError, CkptsyncError):
        return False
    return mark in (b"", _digest(files))  # empty: of earlier versions


def drop(pin: Pin, during: contextlib.AbstractContextManager[object] | None = None) -> None:
    """Delete a pin: it is gone at once, its files a moment later.  A later pin at its path stays.

    ``during``: a lock that is held for the first step only.
    """
    gone = pin.path.with_name(f".gone-{pin.node}-{pin.path.name}")
    with translate_errors(pin.path):
        remove(gone)
        with (
            during or contextlib.nullcontext(),
            contextlib.suppress(Incomplete),
            _open_same_pin(pin),
        ):
            try_rename(pin.path, gone)
        remove(gone)


def renew_ownership(pin: Pin) -> None:
    """Show the other nodes on this output directory that the pin's owner is alive."""
    # `_ckptsync` may be deleted at any moment
    with contextlib.suppress(Incomplete), translate_errors(pin.path):
        safe_files.touch(pin.path / "owner.json")


def link_files(pin: Pin, source: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Pin new files; return the names that this file system cannot link.

    Files that are gone are not among them. Raises ConfigError where files belong to another user,
    StoreError where the disk refuses.
    """
    refused = []
    is_another = False
    with translate_errors(pin.path), Tree(pin.root) as tree:
        for name in names:
            if not link_file(tree, source, name):
                refused.append(name)
            elif not is_another:
                _remove_notes(pin)
                is_another = True
    return tuple(refused)


def unlink_files(pin: Pin, names: Iterable[str]) -> None:
    """Unpin names that the trainer itself has removed."""
    with translate_errors(pin.path):
        _remove_notes(pin)
        for name in names:
            unlink(pin.root / name)


def _remove_notes(pin: Pin) -> None:
    """Remove what was noted of other files than the pin will hold."""
    for name in ("stored", NOTES):
        unlink(pin.path / name)


def link_file(tree: Tree, source: Path, name: str) -> bool:
    """Link a file into a pin; return False where the file system has no hard links.

    True if the file has gone.  Raises ConfigError for another user's file.
    """
    target, new = tree.place(name)
    try:
        with opened_parent(source, name) as (parent, last):
            link(parent, last, target, new)
    except (
        FileNotFoundError,
        FileExistsError,
        Incomplete,
    ):  # rotation was quicker, or it is pinned already
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
    """Replace hard links by reflinks where possible: later writes cannot change the pin."""
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
    """Put right what a killed worker of this node left half done.

    Raises StoreError or ConfigError. What was being made, or removed, goes.  A claim that was cut
    short is finished: its files may be the last there are.  Call it before anything else of the
    same node runs.
    """
    for path in list_paths(output_dir / SPOOL / "pins"):
        claimed = _CLAIM.fullmatch(path.name)
        if claimed and claimed[1] == node:
            with contextlib.suppress(Incomplete), translate_errors(path):
                _write_owner(path, node)
                publish(output_dir, claimed[2], path)
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
    """Put right what other nodes left half done, long after they stopped.

    ``now``: seconds since the epoch.  What cannot be removed stays.
    """
    for path in list_paths(output_dir / SPOOL / "pins"):
        claimed = _CLAIM.fullmatch(path.name)
        if not (claimed or _HALF_DONE.fullmatch(path.name)):
            continue
        with contextlib.suppress(CkptsyncError), translate_errors(path):  # another user's, or gone
            if now - safe_files.last_change(path) < _ABANDONED_AFTER:  # a copy grows
                continue
            if claimed:
                # if its owner shows no pulse, it is claimed again
                publish(output_dir, claimed[2], path)
            else:
                remove(path)


def free_bytes(output_dir: Path) -> int:
    """Return the free bytes where the pins lie, nearly always the trainer's disk.

    Raise Incomplete if it is gone.
    """
    with translate_errors(output_dir):
        try:
            with open_folder(output_dir / SPOOL) as fd:
                disk = os.fstatvfs(fd)
        except FileNotFoundError:
            disk = os.statvfs(output_dir)
        return disk.f_bavail * disk.f_frsize


def _load_pin(path: Path, above: int) -> Pin | None:
    """Return the pin at a path in the open directory of pins; ``None`` if there is none."""
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
        held = walk(path / "files", above=fd).files
        return Pin(
            checkpoint,
            k,
            node,
            mark.st_mtime_ns,
            path,
            held,
            read_marker_in(fd, COMMIT, Commit),
            read_marker_in(fd, NOTES, PinNotes) or _NOTHING,
            walk(path / "added", above=fd).files,
            _is_stored(fd, held),
            pin_id,
        )
    return None  # dropped meanwhile


def _read_pin(path: Path) -> Pin | None:
    """Return the pin at a path; ``None`` if there is none."""
    with (
        contextlib.suppress(Incomplete),
        translate_errors(path.parent),
        open_folder(path.parent) as fd,
    ):
        return _load_pin(path, fd)
    return None


def _split_name(path: Path) -> tuple[str, int]:
    """Return the checkpoint and number in a pin's name; -1 for what is no pin."""
    named = None if path.name.startswith(".") else _NAME.fullmatch(path.name)
    return (named[1], int(named[2])) if named else (path.name, -1)


@contextlib.contextmanager
def _open_same_pin(pin: Pin) -> Iterator[int]:
    """Open a pin; raise Incomplete if it has gone, also if a later one has its path."""
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
    """Return the node and id of an open pin; empty without an owner, or in a torn file."""
    owner = load_json(folder, "owner.json")
    values = (owner.get("node"), owner.get("id", "")) if isinstance(owner, dict) else ("", "")
    node, pin_id = (x if isinstance(x, str) and _NODE.fullmatch(x) else "" for x in values)
    return (node, pin_id) if node else ("", "")


def _write_owner(folder: Path, node: str, name: str = "owner.json") -> None:
    write_json(folder, name, {"node": node, "id": secrets.token_hex(8)})
