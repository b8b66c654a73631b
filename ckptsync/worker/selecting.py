"""Which files of a checkpoint are sent, by the operator's choice.  Pure.

What the layouts demand is judged by the whole checkpoint all the same: where optimizer states stay behind, the store says that they are missing
for resuming, and not that nothing is.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckptsync.merge.output import is_beside
from ckptsync.model import Demands
from ckptsync.worker.options import Preset, WorkerOptions

_OPTIMIZER = re.compile(
    r"optimizer(_[0-9]+)?\.(pt|bin)|.*_optim_states\.pt|optim_world_size_[0-9]+_rank_[0-9]+\.pt"  # of verl
)
_OPTIMIZER_FOLDER = re.compile(r"(?:.*/)?optimizer(_[0-9]+)?/.*", re.DOTALL)
_FOR_RESUMING = re.compile(
    r"scheduler(_[0-9]+)?\.(pt|bin)|scaler\.pt|sampler(_[0-9]+)?\.bin|dl_state_dict(_[0-9]+)?\.bin|rng_state(_[0-9]+)?\.pth"
    r"|random_states_[0-9]+\.pkl|custom_checkpoint_[0-9]+\.pkl|extra_state_world_size_[0-9]+_rank_[0-9]+\.pt|training_args\.bin"
)
_DESCRIBING = re.compile(r"\.metadata|.*\.index\.json|latest|trainer_state\.json")


@dataclass(frozen=True, slots=True)
class Selection:
    """``preset``, and of that what matches a glob of ``include`` (none: everything), and none of ``exclude``.

    A glob is of a path in the checkpoint, or of its last part.  The small files that say what the others are always belong to it.
    """

    preset: Preset = "all"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self == EVERYTHING


EVERYTHING = Selection()


def chosen(options: WorkerOptions) -> Selection:
    """What the operator chose."""
    return Selection(options.send, options.include, options.exclude)


def select(paths: Iterable[str], selection: Selection, demands: Demands) -> frozenset[str]:
    """The paths to send.  ``demands``: of the whole checkpoint, as far as this node can tell.

    Optimizer states that a model can only be made from (ZeRO-3 without gathered weights) belong to the model.
    """
    return frozenset(
        p for p in paths if _is_describing(p) or (_is_preset(p, selection.preset, demands) and _is_wanted(p, selection))
    )


def _is_preset(path: str, preset: Preset, demands: Demands) -> bool:
    if preset == "all" or path in demands.model:
        return True
    if is_of_optimizer(path):
        return False
    # a node with shards only cannot tell what the model needs: what is not known to be for resuming may be weights
    return preset == "no-optimizer" or not (demands.model or _FOR_RESUMING.fullmatch(_last(path)))


def _is_wanted(path: str, selection: Selection) -> bool:
    return (not selection.include or _matches(path, selection.include)) and not _matches(path, selection.exclude)


def _matches(path: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(_last(path), glob) for glob in globs)


def _is_describing(path: str) -> bool:
    return is_beside(path) or _DESCRIBING.fullmatch(_last(path)) is not None


def is_of_optimizer(path: str) -> bool:
    """Whether a file holds optimizer states alone, by its name."""
    return _OPTIMIZER.fullmatch(_last(path)) is not None or _OPTIMIZER_FOLDER.fullmatch(path) is not None


def is_of_states(path: str) -> bool:
    """Return whether a trainer writes such a file into its checkpoints, to resume, and never beside its final model."""
    name = _last(path)
    return is_of_optimizer(path) or (_FOR_RESUMING.fullmatch(name) is not None and name != "training_args.bin")


def _last(path: str) -> str:
    return path.rpartition("/")[2]
