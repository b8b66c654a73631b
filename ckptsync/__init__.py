"""Collect, merge and verify finished training checkpoints.

A training on several nodes writes each save in shards, and rotation deletes it soon. So a worker on
each node uploads finished saves to one store, and heads merge, verify and repair them there. Nodes
and heads meet in the store alone: all facts are files and records in it.

Programs call the functions of `ckptsync.api`, which are offered here, and `mark_saved`. To read
the code, begin at `cli.main` (commands), `service.run` (services) or `hooks` (in a training);
docs/design.md lists the packages and follows the three main flows.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ckptsync.api import diff, inspect, list_checkpoints, merge, pull, push, resume_step, verify

__version__ = "0.1.0"
__all__ = (
    "diff",
    "inspect",
    "list_checkpoints",
    "mark_saved",
    "merge",
    "pull",
    "push",
    "resume_step",
    "verify",
)


def __getattr__(name: str) -> object:
    """Return the function of `ckptsync.api` that has this name; raise AttributeError for others.

    `ckptsync.api` is imported here, and not above, so that ``import ckptsync`` costs nothing.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckptsync import api  # noqa: PLC0415

    return getattr(api, name)


def mark_saved(
    path: str | os.PathLike[str], *, part: Literal["mine", "all"] = "mine", strict: bool = False
) -> bool:
    """Tell the worker that a checkpoint is written.

    Rotation cannot delete it any more, and the worker uploads it at once.

        engine.save_checkpoint(out, tag)
        ckptsync.mark_saved(f"{out}/{tag}")

    Call it after the save has returned, on every rank, before the next step. ``part="mine"``: this
    rank's part is written. The call of the last rank that writes into the directory hard-links all
    files there. Ranks that write no files, or write them elsewhere, call it too. Or call it with
    ``part="all"`` on one rank (of each node, where nodes share no disk) when every rank's part is
    written: after a barrier, or where that rank alone writes.

    For ``part="mine"``, several ranks need torch's process group; else ranks are found in the
    environment (``RANK``, ``WORLD_SIZE``, Open MPI's, PMI's, Slurm's). On several nodes that share
    no disk the worker judges a training's first save by its files.

    ``path``: the checkpoint's own directory, or Lightning's file, under a name that a worker finds
    (`ckptsync help trainers`): ``checkpoint-N``, ``checkpoints/checkpoint_K``, ``global_stepN``,
    ``step-N``, ``NAME.ckpt``; or the output directory with the final model in it.

    The call waits for no other rank, needs neither torch nor transformers, and returns whether all
    files are hard-linked now: `True` on one rank at most. It logs what goes wrong
    (``ckptsync.hook``), and the worker judges the files as ever. With ``strict`` it raises that, as
    one of `ckptsync.errors`: ConfigError (no worker would find it, or the ranks are unknown),
    Incomplete (not there, or it changes), StoreError (the disk refuses).
    """
    # imported here, so that `import ckptsync` costs nothing
    from ckptsync.hooks.mark_saved import mark_saved as mark  # noqa: PLC0415

    return mark(path, part=part, strict=strict)
