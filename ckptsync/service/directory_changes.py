"""Notice cheaply that names have come or gone in an output directory.

File servers send no events.  A directory's own times change with the names in it, so the worker
compares them each second, for the few directories in which checkpoints may appear, and scans only
after a change.  This makes scans sooner and never replaces them: only a scan sees a file grow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from ckptsync.checkpoint_dirs import holds_checkpoints
from ckptsync.walk import SPOOL, open_directory, split

_NEWEST = 3  # folders at each depth
_DEEPEST = 4  # such as lightning_logs/version_0/checkpoints/last.ckpt
_MOST_CHECKED = 64  # directories of an output directory
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def directory_states(directories: Iterable[str | Path]) -> tuple[tuple[int, ...], ...]:
    """Return the state of each directory, which differs once a name in it has come or gone.

    A state is its mtime, links, size and inode, or () if it is missing or cannot be opened.  Each
    costs some µs.  Directories are opened, since NFS asks its server again at an open.
    """
    states: list[tuple[int, ...]] = []
    for directory in directories:
        path = Path(directory)
        try:
            fd = open_directory(path) if split(path)[1] else os.open(path, _DIRECTORY)
        except OSError:  # not there yet, or not ours to read: a scan says so
            states.append(())
            continue
        try:
            info = os.fstat(fd)
            # two changes within a tick of the kernel's clock have one time, but seldom one size
            states.append((info.st_mtime_ns, info.st_nlink, info.st_size, info.st_ino))
        except OSError:  # a file server that forgot it
            states.append(())
        finally:
            os.close(fd)
    return tuple(states)


def directories_to_check(output_dir: Path) -> tuple[str, ...]:
    """Return the directories of an output directory in which something may appear; at most 64.

    These are itself, its spool's pins, and the containers and newest directories, four levels
    deep.  The first two need not exist.
    """
    fixed_dirs = (str(output_dir), str(output_dir / SPOOL / "pins"))
    return (*fixed_dirs, *islice(_below(output_dir, 1), _MOST_CHECKED - len(fixed_dirs)))


def _below(folder: Path, depth: int) -> Iterator[str]:
    """Yield up to three containers (at depth 1) and the three newest folders of a folder.

    Each is followed by those below it, down to `_DEEPEST`.  Links, and hidden names that are no
    container, are left out.  What cannot be read has none.
    """
    dated_names: list[tuple[int, str]] = []
    # gone, or not ours to read: a scan says so
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(("_", ".")) and not holds_checkpoints(entry.name):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    dated_names.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    names = [name for _, name in sorted(dated_names, reverse=True)]
    # new checkpoints appear in them, however old they are
    containers = [name for name in names if holds_checkpoints(name) or name == "lightning_logs"][
        :_NEWEST
    ]
    containers = containers if depth == 1 else []
    newest = [name for name in names if name not in containers][:_NEWEST]
    for name in (*containers, *newest):
        yield str(folder / name)
        if depth < _DEEPEST:
            yield from _below(folder / name, depth + 1)
