"""What is kept of saves whose pins are let go while the trainer still has them: what their manifests say, and what the hook added to them.

    <output_dir>/_ckptsync/took/<checkpoint>.<n>/took.json     as beside the pin (`ckptsync.spool.marks`)
    <output_dir>/_ckptsync/took/<checkpoint>.<n>/commit.json   the same, where something was added
    <output_dir>/_ckptsync/took/<checkpoint>.<n>/added/…       further names of the pin's own: no bytes, where the spool has links

Without it a manifest, or an added file, that was damaged in the store could not be written again: the trainer has neither.
Each appears by one rename, and may be deleted at any moment; what is read of it is proven by a digest of the store before it is sent.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ckptsync.errors import Incomplete
from ckptsync.spool import folders
from ckptsync.spool.folders import children, refusals, remove, renamed
from ckptsync.spool.marks import Commit, Took, commit_of, took_of, write_mark
from ckptsync.spool.pins import Pin, pins
from ckptsync.walk import OURS, Stat, walk
from ckptsync.worker.plan import Read
from ckptsync.worker.snapshot import Held

_NOTHING = Took()
_READ = re.compile(r"([0-9]{1,20}) ([0-9]{1,20}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one save: what was said of it, and the files in ``root`` that the hook added to those of ``commit``."""

    took: Took
    commit: Commit | None
    root: Path
    added: tuple[Stat, ...]


def remember(output_dir: Path, pin: Pin) -> None:
    """Keep what lies beside a pin, once.  Raises Incomplete if the pin has gone, StoreError where the disk refuses."""
    added = pin.added if pin.is_committed else ()
    if (pin.took == _NOTHING and not added) or any(_is_of(kept, pin) for kept in kept_of(output_dir, pin.checkpoint)):
        return
    fresh = _folder(output_dir) / f".new-{pin.node}-{pin.path.name}"
    with refusals(output_dir):
        remove(fresh)
        folders.make(fresh.parent)
        folders.make_new(fresh)
        write_mark(fresh / "took.json", pin.took)
        if added:
            folders.make_in(fresh / "added")
            for name in ("commit.json", *(f"added/{file.path}" for file in added if "/" not in file.path)):
                folders.link_or_copy(pin.path / name, fresh / name)
        n = pin.k
        while not renamed(fresh, fresh.with_name(f"{pin.checkpoint}.{n}")):
            if folders.status(fresh) is None:
                raise FileNotFoundError(fresh)
            n += 1


def keep(output_dir: Path, name: str, took: Took) -> None:
    """What was said of a save that was sent without a pin; ``name`` is a checkpoint's with a number.  Raises StoreError where the disk refuses."""
    with refusals(output_dir):
        write_mark(_folder(output_dir) / name / "took.json", took)


def kept_of(output_dir: Path, checkpoint: str) -> tuple[Kept, ...]:
    """Of every save of a checkpoint's name, the latest first."""
    numbered = (path.name.rpartition(".") for path in children(_folder(output_dir)))
    found = sorted((int(n) for name, _, n in numbered if name == checkpoint and n.isdecimal()), reverse=True)
    return tuple(_kept(_folder(output_dir) / f"{checkpoint}.{n}") for n in found)


def with_read(took: Took, read: Read) -> Took:
    """Return ``took`` with the digests of files that the store had already."""
    return replace(took, read={path: f"{size} {mtime} {digest}" for (path, size, mtime), digest in sorted(read.items())})


def read_before(output_dir: Path) -> dict[str, Read]:
    """Return, by checkpoint, the digests that `with_read` has put beside pins and what is kept of them."""
    kept = ((path.name.rpartition(".")[0], took_of(path)) for path in children(_folder(output_dir)))
    found: dict[str, Read] = {}
    for checkpoint, took in (*kept, *((pin.checkpoint, pin.took) for pin in pins(output_dir))):
        words = ((path, _READ.fullmatch(word)) for path, word in took.read.items())
        read = {(path, int(m[1]), int(m[2])): m[3] for path, m in words if m}
        if read:
            found[checkpoint] = {**found.get(checkpoint, {}), **read}
    return found


def added_here(output_dir: Path) -> Iterator[Held]:
    """Each file that the hook has added to any save, wherever the spool still has it: a run's saves have the same ones."""
    told: set[tuple[str, int, int]] = set()
    spool = output_dir / OURS
    several = (children(spool / "added"), *([one / "added" for one in children(spool / of)] for of in ("pins", "took")))
    for folder in (folder for found in several for folder in found):
        for stat in walk(folder).files:
            if (stat.path, stat.device, stat.inode) not in told:
                told.add((stat.path, stat.device, stat.inode))
                yield Held(stat, folder, is_pinned=True, is_added=True)


def size(output_dir: Path) -> int:
    """Bytes of the added files that are kept, each counted once.  Cheap while nothing comes or goes."""
    try:
        found = folders.status(_folder(output_dir))
    except OSError:  # not to be looked at: a look says why
        return 0
    return _size(_folder(output_dir), found.st_mtime_ns) if found else 0


def give_way(output_dir: Path) -> bool:
    """Let go of all added files: they are a safeguard, and give way to any save.  Whether there were any.  Raises StoreError."""
    given = False
    for path in children(_folder(output_dir)):
        gone = path.with_name(f".gone-{path.name}")
        with contextlib.suppress(Incomplete), refusals(path):
            remove(gone)
            if folders.is_folder(path / "added") and renamed(path / "added", gone):
                given = True
                remove(gone)
    return given


def forget(output_dir: Path, here: Collection[str]) -> None:
    """Let go of what is kept of checkpoints that are not here any more, and of what a killed worker left half done."""
    for path in children(_folder(output_dir)):
        if path.name.rpartition(".")[0] not in here:
            with contextlib.suppress(Incomplete), refusals(path):
                remove(path)


def _is_of(kept: Kept, pin: Pin) -> bool:
    """Whether this is what `remember` would keep of the pin: it was killed before the pin went."""
    added = {(f.path, f.size, f.mtime) for f in pin.added} if pin.is_committed else set()
    is_whole = added <= {(f.path, f.size, f.mtime) for f in kept.added} and (not added or kept.commit == pin.commit)
    return kept.took == pin.took and is_whole


def _kept(path: Path) -> Kept:
    return Kept(took_of(path), commit_of(path), path / "added", walk(path / "added").files)


@lru_cache(maxsize=64)
def _size(folder: Path, _: int) -> int:
    """``_``: when something came or went last (ns)."""
    every = (f for path in children(folder) for f in walk(path / "added").files)
    return sum({(f.device, f.inode): f.size for f in every}.values())


def _folder(output_dir: Path) -> Path:
    return output_dir / OURS / "took"
