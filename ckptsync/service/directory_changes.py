"""A quick check each second of whether names have come or gone, where no event can be relied on.

It makes scans sooner and never replaces them: only a scan finds what a file gains.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from ckptsync.checkpoint_dirs import NESTED
from ckptsync.walk import SPOOL, open_directory, split

_CONTAINERS = (*NESTED, "lightning_logs")  # new checkpoints appear in them, however old they are
_NEWEST = 3  # folders at each depth
_DEEPEST = 4  # such as lightning_logs/version_0/checkpoints/last.ckpt
_MOST_CHECKED = 64  # directories of an output directory
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def directory_states(directories: Iterable[str | Path]) -> tuple[tuple[int, ...], ...]:
    """Return a tuple that differs once a name in one of these directories has come or gone.

    A directory's times change with the names in it, and with nothing else.

    Some µs each.  They are opened, not only looked up, since NFS asks the server again at an open.
    A directory that is missing is no error.
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

    These are itself, our pins, and the newest directories at every depth, as they are now.
    """
    own = (str(output_dir), str(output_dir / SPOOL / "pins"))
    return (*own, *islice(_below(output_dir, 1), _MOST_CHECKED - len(own)))


def _below(folder: Path, depth: int) -> Iterator[str]:
    """Yield the containers and the newest folders, and what is in them."""
    found: list[tuple[int, str]] = []
    # gone, or not ours to read: a scan says so
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(("_", ".")):
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    names = [name for _, name in sorted(found, reverse=True)]
    known = [name for name in names if name in _CONTAINERS or name.startswith("run-")][:_NEWEST]
    known = known if depth == 1 else []
    newest = [name for name in names if name not in known][:_NEWEST]
    for name in (*known, *newest):
        yield str(folder / name)
        if depth < _DEEPEST:
            yield from _below(folder / name, depth + 1)
