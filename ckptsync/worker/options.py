"""A worker's options: node id, output directory, waiting times, and what is sent.

The service, commands and tests start workers, each with options from elsewhere.  So they are one
value, and `checked_options` checks what is dangerous for any of them: names that a store cannot
keep, and an output directory and a store that lie in each other.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptsync.checkpoint_dirs import checkpoint_dir_at, is_plain_name
from ckptsync.errors import ConfigError, Corrupt, Unsupported
from ckptsync.records.store_paths import checked_node
from ckptsync.safe_names import checked_run_name
from ckptsync.stores.limits import Limits
from ckptsync.stores.urls import path_of
from ckptsync.walk import SPOOL
from ckptsync.worker.file_selection import Preset, Selection

Order = Literal["oldest", "newest"]
Superseded = Literal["keep", "drop"]
Clean = Literal["off", "verified"]


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run: its name in the store, and the trainer's output directory on this node."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of the worker of one output directory; `ckptsync.config` has checked them.

    Seconds: ``quiet`` without a change finishes a save that has its trainer's last file,
    ``unmarked`` one of which nothing tells. ``keep_pins``: how many pinned checkpoints of a run are
    kept once they are VERIFIED in the store.  ``threads``: large files sent at once. ``order``:
    which of several finished saves goes first.  ``superseded``: whether one that a newer finished
    save has overtaken is still sent. ``send``, ``include``, ``exclude``: which files
    (`worker.file_selection`).  ``spool_budget``: bytes that pins alone may hold, 0: as the disk
    allows; ``spool_full``: what gives way then (`spool_room.SpoolRule`).  ``clean``: whether local
    checkpoints that are VERIFIED in the store are removed, all but the newest ``keep_local``
    (`worker.cleanup`).
    """

    node: str
    run: RunDir
    quiet: float = 10.0
    unmarked: float = 60.0
    keep_pins: int = 2
    threads: int = Limits().threads
    order: Order = "oldest"
    superseded: Superseded = "keep"
    send: Preset = "all"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    spool_budget: int = 0
    spool_full: str = "oldest"
    clean: Clean = "off"
    keep_local: int = 2

    @property
    def selection(self) -> Selection:
        """Return which files are sent."""
        return Selection(self.send, self.include, self.exclude)


def checked_options(options: WorkerOptions, store_url: str) -> WorkerOptions:
    """Return ``options`` after checking names, and that run and store do not overlap.

    Raises ConfigError.
    """
    try:
        checked_node(options.node)
    except Corrupt as e:
        raise ConfigError(
            str(e), hint="give it another: `node` of the configuration, or CKPTSYNC_NODE"
        ) from e
    checked_run(options.run.name)
    root = local_root(store_url)
    if root is not None:
        refuse_overlap(options.run.path, root)
    return options


def checked_run(name: str) -> str:
    """Return ``name`` if a store can keep a run of that name; raise ConfigError if not."""
    try:
        return checked_run_name(name)
    except Corrupt as e:
        plain = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("./_-")[:50] or "llama-sft"
        raise ConfigError(f"run {e}", hint=f"give it another, such as {plain}") from e


def local_root(store_url: str) -> Path | None:
    """Return the directory of a store on this file system, or None for other stores."""
    try:
        return Path(path_of(store_url)).resolve()
    except Unsupported:  # a scheme of another machine
        return None


def refuse_overlap(directory: Path, root: Path, checkpoints: Collection[Path] = ()) -> None:
    """Raise ConfigError if a source lies in the store, or the store in its spool or a checkpoint.

    Files that were sent would be found, and sent again.  ``checkpoints``: further directories that
    the user calls checkpoints.
    """
    inside = directory.resolve()
    if inside == root or root in inside.parents:
        raise ConfigError(
            f"{directory}: lies inside the store {root}",
            hint="keep output directories and the store apart",
        )
    above = [p for p in (root, *root.parents) if p == inside or inside in p.parents]
    if any(p.name == SPOOL or p in checkpoints or checkpoint_dir_at(p) is not None for p in above):
        raise ConfigError(
            f"{root}: the store lies inside a checkpoint of {directory}",
            hint="keep checkpoints and the store apart",
        )


def push_command(directory: Path, *store: str, whole: bool = False) -> str:
    """Return the command that uploads a directory; ``whole``: all of it as one checkpoint.

    ``store``: its URL, or the words that name it, if any.
    """
    store = tuple(filter(None, store))
    words = ["ckptsync", "push", str(directory), *(["--store"] if len(store) == 1 else []), *store]
    name = os.path.basename(os.path.abspath(directory))  # noqa: PTH100, PTH119 - no link is followed
    if whole:
        words += ["--as", name if is_plain_name(name) else "NAME"]
    return shlex.join(words)
