"""What the hook does when it commits a save, without a trainer.

And what a worker does that finds one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ckptsync.spool.markers import Commit, write_mark
from ckptsync.spool.pins import Pin, create_pin, link_files, list_pins, publish
from ckptsync.walk import walk


def commit(
    source: Path, save: str = "save", added: Mapping[str, bytes] | None = None, world: int = 1
) -> Path:
    """Publish a pin as the hook does: links, commit record, ``added`` files; return its path.

    It has no owner yet.
    """
    fresh = source.parent / "_ckptsync" / "pins" / ".new-hook-1"
    (fresh / "files").mkdir(parents=True)
    files = walk(source).files
    for file in files:
        (fresh / "files" / file.path).parent.mkdir(parents=True, exist_ok=True)
        os.link(source / file.path, fresh / "files" / file.path)
    stats = {f.path: (f.size, f.mtime) for f in files}
    step = int(source.name.rpartition("-")[2])
    write_mark(
        fresh / "commit.json",
        Commit("train", save, source.name, step, world, (0,), "host", "hf", 0.0, stats),
    )
    for name, content in (added or {}).items():
        (fresh / "added").mkdir(exist_ok=True)
        (fresh / "added" / name).write_bytes(content)
    return publish(source.parent, source.name, fresh)


def pinned(source: Path, node: str = "n0") -> Pin:
    """Return a new pin of all files of a checkpoint, made as a worker does."""
    pin = create_pin(source.parent, source.name, 0, node)
    assert pin is not None
    assert link_files(pin, source, [f.path for f in walk(source).files]) == ()
    return list_pins(source.parent)[0]
