"""A glance at a few directories, each second: enough to know that a look is due where nobody can promise an event.

A directory's times change with the names in it, and with nothing else: what a file that is there already gains, only a look finds.  So a
glance makes looks sooner and never replaces them: while a save is being written one looks anyway, and now and then whatever it says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsync.scan import NESTED
from ckptsync.walk import OURS, open_directory, split

_CONTAINERS = (*NESTED, "lightning_logs")  # new checkpoints appear in them, however old they are
_NEWEST = 3
_DEEPEST = 4  # lightning_logs/version_0/checkpoints/last.ckpt
_MOST = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def glance(directories: Iterable[str | Path]) -> tuple[tuple[int, ...], ...]:
    """Something that is another tuple once a name in one of these directories has come or gone.  One that is not there is no error.

    Some µs each.  They are opened, not only looked up, since NFS asks the server again at an open.
    """
    return tuple(_state(directory) for directory in directories)


def aims(output_dir: Path) -> tuple[str, ...]:
    """The directories of an output directory in which something may appear: itself, our pins, and the newest ones at every depth.

    Find them anew after each look; at most 64.
    """
    below = (path for path in _below(output_dir, 1))
    found = [str(output_dir), str(output_dir / OURS / "pins")]
    return tuple(found + [path for path, _ in zip(below, range(_MOST - len(found)), strict=False)])


def _below(folder: Path, depth: int) -> Iterator[str]:
    """The containers and the newest folders, and what is in them."""
    found = sorted(_folders(folder), reverse=True)
    known = [name for _, name in found if name in _CONTAINERS or name.startswith("run-")][:_NEWEST] if depth == 1 else []
    newest = [name for _, name in found if name not in known][:_NEWEST]
    for name in (*known, *newest):
        yield str(folder / name)
        if depth < _DEEPEST:
            yield from _below(folder / name, depth + 1)


def _folders(folder: Path) -> Iterator[tuple[int, str]]:
    """With the time of their last change."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # gone, or not ours to read: a look says so
        for entry in entries:
            if entry.name.startswith(("_", ".")):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False).st_mtime_ns, entry.name


def _state(directory: str | Path) -> tuple[int, ...]:
    try:
        path = Path(directory)
        fd = open_directory(path) if split(path)[1] else os.open(path, _DIRECTORY)
    except OSError:
        return ()  # not there yet, or not ours to read: a look says so
    try:
        info = os.fstat(fd)
    except OSError:  # a file server that forgot it
        return ()
    finally:
        os.close(fd)
    # two changes within a tick of the kernel's clock have one time, but seldom one size
    return (info.st_mtime_ns, info.st_nlink, info.st_size, info.st_ino)
