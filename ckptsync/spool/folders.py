"""What is done in folders that other processes use, and may delete, at the same moment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ckptsync.errors import ConfigError, Incomplete, StoreError

NO_LINKS = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """What the system refuses below ``path``, as one of our errors: Incomplete (gone), ConfigError (not ours), StoreError (the disk)."""
    try:
        yield
    except PermissionError as e:
        raise ConfigError(f"{path}: may not be written by uid {os.geteuid()}", hint="run the worker as the user who trains") from e
    except (FileNotFoundError, NotADirectoryError) as e:
        raise Incomplete(f"{path}: gone", hint="it is made again with the next look") from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}", hint="look at the disk that the trainer writes to") from e


def written(folder: Path, name: str, told: object) -> None:
    """Write a small JSON file whole or not at all, and never make a folder again that somebody has just removed.  Raises OSError."""
    fresh = folder / f".fresh-{name}"
    fresh.write_text(json.dumps(told) + "\n")
    fresh.replace(folder / name)


def opened_like(path: Path, like: int) -> BinaryIO:
    """A new file at ``path`` for a copy of ``like``, an open one; others may do with it no more than with that.  Raises OSError."""
    # trainers write weights that are their user's alone (safetensors 0.8), and some files are read only
    mode = stat.S_IMODE(os.fstat(like).st_mode) | stat.S_IWUSR
    path.unlink(missing_ok=True)
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def renamed(path: Path, target: Path) -> bool:
    """Whether we moved it: not if somebody stands there already (with something in it), nor if it is gone.  Raises OSError."""
    try:
        path.rename(target)
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            return False
        raise
    return True


def children(folder: Path) -> list[Path]:
    """None where nothing was ever kept, or somebody deleted it.  Raises as `refusals`."""
    with contextlib.suppress(Incomplete), refusals(folder):
        return sorted(folder.iterdir())
    return []


def remove(path: Path) -> None:
    """With all that is in it; it may be gone.  Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
