"""What manifests say of saves whose pins are let go while the trainer still has them: kept for as long as that, in the spool.

    <output_dir>/_ckptsync/took/<checkpoint>.<k>/took.json    as beside the pin (`ckptsync.spool.marks`)

Without it a manifest that was damaged in the store could not be written again byte for byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from ckptsync.spool.marks import Took, took_of, write_mark
from ckptsync.spool.pins import Pin, refusals
from ckptsync.walk import OURS


def remember(output_dir: Path, pin: Pin) -> None:
    """Keep what is said beside a pin.  Raises StoreError where the disk refuses."""
    if pin.took != Took():
        keep(output_dir, pin.path.name, pin.took)


def keep(output_dir: Path, name: str, took: Took) -> None:
    """The same of a save that was sent without a pin; ``name`` is a checkpoint's with a number.  Raises StoreError where the disk refuses."""
    with refusals(output_dir):
        write_mark(_folder(output_dir) / name / "took.json", took)


def remembered(output_dir: Path, checkpoint: str) -> tuple[Took, ...]:
    """Of every save of a checkpoint's name, the latest first."""
    found = [path for path in _kept(output_dir) if path.name.rpartition(".")[0] == checkpoint]
    return tuple(took_of(path) for path in reversed(found))


def forget(output_dir: Path, here: Collection[str]) -> None:
    """Let go of what is kept of checkpoints that are not here any more."""
    for path in _kept(output_dir):
        if path.name.rpartition(".")[0] not in here:
            with refusals(path):
                shutil.rmtree(path)


def _folder(output_dir: Path) -> Path:
    return output_dir / OURS / "took"


def _kept(output_dir: Path) -> list[Path]:
    folder = _folder(output_dir)
    return sorted(folder.iterdir()) if folder.is_dir() else []
