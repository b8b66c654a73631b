"""Copies of this node's manifests in the spool, to write a damaged one again.

They lie in `<output_dir>/_ckptsync/manifests/<location>/<record>`.

All of it may be deleted at any moment.  What is read is proven by its digest before it is stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Incomplete
from ckptsync.records.store_paths import RecordName, checkpoint_of
from ckptsync.spool import folders
from ckptsync.spool.folders import children, refusals, remove
from ckptsync.walk import SPOOL


def keep_manifest(output_dir: Path, name: str, data: bytes) -> None:
    """Keep a copy of a manifest, where there is a spool.

    A disk that refuses it costs the copy alone.
    """
    path = _path(output_dir, name)
    if not (output_dir / SPOOL).is_dir():
        return
    with contextlib.suppress(CkptsyncError), refusals(output_dir):
        folders.make(path.parent)
        folders.write(path, data)


def kept_manifest(output_dir: Path, name: RecordName) -> bytes | None:
    """Return the bytes of one of this node's manifests, if there is a whole copy."""
    with contextlib.suppress(CkptsyncError, OSError), refusals(output_dir):
        data = folders.read(_path(output_dir, str(name)))
        return data if data is not None and digest(data)[:16] == name.digest else None
    return None


def forget_manifests(output_dir: Path, here: Collection[str]) -> None:
    """Remove the copies for checkpoints that are not in ``here``."""
    for path in children(output_dir / SPOOL / "manifests"):
        if checkpoint_of(path.name) not in here:
            with contextlib.suppress(Incomplete), refusals(path):
                remove(path)


def _path(output_dir: Path, name: str) -> Path:
    """A record's name ends in ``<location>/<record>``."""
    return output_dir.joinpath(SPOOL, "manifests", *name.split("/")[-2:])
