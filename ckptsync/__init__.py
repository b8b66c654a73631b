"""ckptsync: every finished checkpoint ends up whole and proven in one place."""

from __future__ import annotations

import os
from typing import Literal

__version__ = "0.1.0"


def mark_saved(path: str | os.PathLike[str], *, part: Literal["mine", "all"] = "mine", strict: bool = False) -> bool:
    """Tell the worker that a checkpoint is written: it is kept from rotation at once, and sent without a wait.

        engine.save_checkpoint(out, tag)
        ckptsync.mark_saved(f"{out}/{tag}")

    Call it when the save has returned, on every rank (``part="mine"``: this rank's part is written), before the next step: when the last
    rank that writes into the directory has called it, in that call, all files there get second names.  Ranks whose files lie elsewhere, or
    that write none, call it too.  Or call it with ``part="all"`` on one rank (of each node, where nodes share no disk), when every rank's
    part is written: after a barrier, or where that rank alone writes.

    Ranks are found by torch's process group, which must be there where there are several (for ``part="mine"``), else in the environment
    (``RANK``, ``WORLD_SIZE``, Open MPI's, PMI's, Slurm's).  On several nodes that share no disk the worker judges a training's first save by its files.

    ``path``: the checkpoint's own directory, or Lightning's file, under a name that a worker finds (`ckptsync help trainers`): ``checkpoint-N``,
    ``checkpoints/checkpoint_K``, ``global_stepN``, ``step-N``, ``NAME.ckpt``; or the output directory with the final model in it.

    It waits for nobody, needs neither torch nor transformers, and says whether all is pinned now: `True` on one rank at most.  What
    goes wrong is logged (``ckptsync.hook``), and the worker judges the files as ever; with ``strict`` it is raised, as one of `ckptsync.errors`:
    ConfigError (no worker would find it, or the ranks cannot be told), Incomplete (not there, or it changes), StoreError (the disk refuses).
    """
    from ckptsync.hooks.mark_saved import mark_saved as mark  # noqa: PLC0415  # `import ckptsync` costs nothing

    return mark(path, part=part, strict=strict)
