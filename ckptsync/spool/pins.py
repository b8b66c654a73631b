"""Pins: names of our own for a checkpoint's files, so that the trainer's rotation takes only its own.

    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/owner.json    who sends it; its mtime is the owner's pulse
    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/files/…       hard links, reflinks, or copies: `ckptsync.spool.links`
    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/added/…       what the hook adds to the trainer's own files
    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/commit.json   the hook's word that it is whole: `ckptsync.spool.marks`
    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/took.json     what the worker's manifest says of it
    <output_dir>/_ckptsync/pins/<checkpoint>.<k>/stored        a manifest in the store names it

Everything here may be deleted at any moment: what is lost is time, and what rotation has deleted.  Nothing is ever written in a
checkpoint's own directory.  A pin appears by one rename: a worker's with its owner in it, so that exactly one node has it; the
hook's with its commit, and with no owner until the first worker, whatever its node id, adopts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.spool import folders
from ckptsync.spool.folders import NO_LINKS, children, opened, refusals, remove, renamed, written
from ckptsync.spool.marks import Commit, Took, commit_of, took_of
from ckptsync.spool.reading import load
from ckptsync.walk import OURS, Stat, walk

_NAME = re.compile(r"(.+)\.([0-9]{1,9})")
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # `ckptsync.records.names.checked_node`
_NOTHING = Took()


@dataclass(frozen=True, slots=True)
class Pin:
    """``files`` lie below `root`, ``added`` below `beside`.  ``node``: who sends it, empty while it is nobody's.

    ``pulse`` (ns, the file system's clock) changes as long as ``node`` is alive.  ``stored``: a manifest of these files is in the store.
    """

    checkpoint: str
    k: int
    node: str
    pulse: int
    path: Path
    files: tuple[Stat, ...] = ()
    commit: Commit | None = None
    took: Took = _NOTHING
    added: tuple[Stat, ...] = ()
    stored: bool = False

    @property
    def root(self) -> Path:
        """Where the pinned files lie, under their own names."""
        return self.path / "files"

    @property
    def beside(self) -> Path:
        """Where the files lie that the hook added."""
        return self.path / "added"

    @property
    def is_committed(self) -> bool:
        """Whether it holds what the hook committed.  A pin whose files were overwritten in place since is one like any other."""
        return self.commit is not None and {f.path: (f.size, f.mtime) for f in self.files} == self.commit.files


@dataclass(frozen=True, slots=True)
class Relation:
    """A pin beside its source, by name: one file under both, another file, only in the source, only in the pin."""

    same: tuple[str, ...]
    changed: tuple[str, ...]
    new: tuple[str, ...]
    vanished: tuple[str, ...]


def compare(pinned: Iterable[Stat], source: Iterable[Stat]) -> Relation:
    """How a pin stands to its source; every name is in exactly one of the four."""
    ours, theirs = {s.path: s for s in pinned}, {s.path: s for s in source}
    both = sorted(ours.keys() & theirs.keys())
    return Relation(
        tuple(p for p in both if ours[p].is_file_of(theirs[p])),
        tuple(p for p in both if not ours[p].is_file_of(theirs[p])),
        tuple(sorted(theirs.keys() - ours.keys())),
        tuple(sorted(ours.keys() - theirs.keys())),
    )


def pins(output_dir: Path, wanted: Callable[[str], bool] = lambda _: True) -> tuple[Pin, ...]:
    """Every pin in an output directory, by checkpoint and number; of those ``wanted`` by their checkpoint's name."""
    found = (_pin(path) for path in children(output_dir / OURS / "pins") if wanted(_numbered(path)[0]))
    return tuple(sorted((p for p in found if p is not None), key=lambda p: (p.checkpoint, p.k)))


def open_pin(output_dir: Path, checkpoint: str, k: int, node: str) -> Pin | None:
    """An empty pin of our own; ``None`` if another was first."""
    folder = output_dir / OURS / "pins"
    with refusals(folder):
        folders.make(folder)
        fresh = folder / f".new-{node}-{checkpoint}"
        remove(fresh)
        folders.make_new(fresh)
        written(fresh, "owner.json", {"node": node})
        return _pin(folder / f"{checkpoint}.{k}") if renamed(fresh, folder / f"{checkpoint}.{k}") else None


def publish(output_dir: Path, checkpoint: str, fresh: Path) -> Path:
    """Let a directory that was made whole beside the pins be the newest pin of a checkpoint, by one rename; where it is now.

    Raises Incomplete if ``fresh`` has gone, StoreError where the disk refuses.
    """
    folder = output_dir / OURS / "pins"
    with refusals(fresh):
        k = max((k for name, k in map(_numbered, children(folder)) if name == checkpoint), default=-1) + 1
        while not renamed(fresh, folder / f"{checkpoint}.{k}"):
            if folders.status(fresh) is None:
                raise FileNotFoundError(errno.ENOENT, "gone", str(fresh))
            k += 1
        return folder / f"{checkpoint}.{k}"


def adopt(pin: Pin, node: str) -> Pin | None:
    """A pin that is nobody's yet as our own; ``None`` if another was first, or it has gone."""
    mark = pin.path / f".owner-{node}"
    with contextlib.suppress(Incomplete), refusals(pin.path):
        written(pin.path, mark.name, {"node": node})
        try:
            with opened(pin.path) as fd:
                folders.link(fd, mark.name, fd, "owner.json")
        except OSError as e:
            if isinstance(e, FileExistsError) and _owner(pin.path):
                return None
            if e.errno not in (errno.EEXIST, errno.EPERM, *NO_LINKS):
                raise
            return claim(pin, node)  # no links here, or an owner that a crash left torn: a rename is exclusive, too
        finally:
            folders.unlink(mark)
        return _pin(pin.path)
    return None


def claim(pin: Pin, node: str) -> Pin | None:
    """The pin of a node that is dead, with its files, as our own; ``None`` if another was first, or it has gone."""
    taken = pin.path.with_name(f".claim-{node}@{pin.path.name}")
    with refusals(pin.path):
        if not renamed(pin.path, taken):
            return None
        try:
            written(taken, "owner.json", {"node": node})
        finally:  # a full disk is no reason to keep it out of sight
            is_back = renamed(taken, pin.path)
        return _pin(pin.path) if is_back else None


def record(pin: Pin, took: Took) -> None:
    """Remember beside a pin what its manifest says; what was said once stays.  Raises Incomplete if the pin has gone.

    ``stable`` is in no manifest, and is said anew of files that came later.
    """
    said, new = took_of(pin.path), dataclasses.asdict(took)
    kept = {key: value or new[key] for key, value in dataclasses.asdict(said).items()} | {"stable": took.stable or said.stable}
    if kept != dataclasses.asdict(said):
        with refusals(pin.path):
            written(pin.path, "took.json", kept)


def mark_stored(pin: Pin) -> None:
    """Tell who waits for it (`ckptsync.hooks`) and the budget that a manifest names this pin's files.  Raises Incomplete if it has gone."""
    if not pin.stored:
        with refusals(pin.path):
            folders.write(pin.path / "stored", b"")


def drop(pin: Pin, during: contextlib.AbstractContextManager[object] | None = None) -> None:
    """Let go of a whole pin; it is gone at once, its files a moment later.  ``during``: a lock that is held for the first of these only."""
    gone = pin.path.with_name(f".gone-{pin.node}-{pin.path.name}")
    with refusals(pin.path):
        remove(gone)
        with during or contextlib.nullcontext():
            is_ours = renamed(pin.path, gone)
        if is_ours:
            remove(gone)


def pulse(pin: Pin) -> None:
    """Show the other nodes on this output directory that the pin's owner lives."""
    with contextlib.suppress(Incomplete), refusals(pin.path):  # `_ckptsync` may be deleted at any moment
        folders.pulse(pin.path / "owner.json")


def free_bytes(output_dir: Path) -> int:
    """What could still be written where the pins lie, which is nearly always the trainer's disk; raises Incomplete if it is gone."""
    with refusals(output_dir):
        try:
            with opened(output_dir / OURS) as fd:
                disk = os.fstatvfs(fd)
        except FileNotFoundError:
            disk = os.statvfs(output_dir)
        return disk.f_bavail * disk.f_frsize


def _pin(path: Path) -> Pin | None:
    checkpoint, k = _numbered(path)
    if k < 0:
        return None
    with contextlib.suppress(Incomplete), refusals(path):
        node = _owner(path)
        if not node and not folders.is_folder(path / "files"):
            return None  # dropped meanwhile, or not of our making
        mark = folders.status(path / "owner.json" if node else path)
        if mark is None:
            return None
        files, added = walk(path / "files").files, walk(path / "added").files
        stored = folders.status(path / "stored") is not None
        return Pin(checkpoint, k, node, mark.st_mtime_ns, path, files, commit_of(path), took_of(path), added, stored)
    return None  # dropped meanwhile


def _numbered(path: Path) -> tuple[str, int]:
    """The checkpoint and number that a pin's name says; -1 for what is no pin."""
    named = None if path.name.startswith(".") else _NAME.fullmatch(path.name)
    return (named[1], int(named[2])) if named else (path.name, -1)


def _owner(path: Path) -> str:
    """Whose pin it is; empty for nobody's, also if a crash left the file torn."""
    told = load(path / "owner.json")
    node = told.get("node") if isinstance(told, dict) else None
    return node if isinstance(node, str) and _NODE.fullmatch(node) else ""
