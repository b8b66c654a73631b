"""Which files of a checkpoint are sent, by the operator's choice.  Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.tensors import Demands

Preset = Literal["all", "no-optimizer", "weights"]
_OPTIMIZER = re.compile(
    # of verl
    r"optimizer(_[0-9]+)?\.(pt|bin)|.*_optim_states\.pt|optim_world_size_[0-9]+_rank_[0-9]+\.pt"
)
_OPTIMIZER_FOLDER = re.compile(r"(?:.*/)?optimizer(_[0-9]+)?/.*", re.DOTALL)
_FOR_RESUMING = re.compile(
    r"scheduler(_[0-9]+)?\.(pt|bin)|scaler\.pt|sampler(_[0-9]+)?\.bin|dl_state_dict(_[0-9]+)?\.bin|rng_state(_[0-9]+)?\.pth"
    r"|random_states_[0-9]+\.pkl|custom_checkpoint_[0-9]+\.pkl|extra_state_world_size_[0-9]+_rank_[0-9]+\.pt|training_args\.bin"
)
_DESCRIBING = re.compile(r"\.metadata|.*\.index\.json|latest|trainer_state\.json")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files are sent: those of ``preset`` that match ``include`` and not ``exclude``.

    ``include`` and ``exclude`` are globs; no ``include`` means everything.

    A glob is of a path in the checkpoint, or of its last part.  The small files that say what the
    others are always belong to it.
    """

    preset: Preset = "all"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self == EVERYTHING


EVERYTHING = Selection()


def select(paths: Iterable[str], selection: Selection, demands: Demands) -> frozenset[str]:
    """Return the paths to send.

    ``demands``: of the whole checkpoint, as far as this node can tell.

    What layouts demand is judged by the whole checkpoint all the same: the store says what is
    missing for resuming. Optimizer states that a model can only be made from (ZeRO-3 without
    gathered weights) belong to the model.
    """

    def is_of_preset(path: str) -> bool:
        if selection.preset == "all" or path in demands.model:
            return True
        if is_of_optimizer(path):
            return False
        # a node with shards only cannot tell what the model needs: what is not known to be for
        # resuming may be weights
        return selection.preset == "no-optimizer" or not (
            demands.model or _FOR_RESUMING.fullmatch(_last(path))
        )

    def matches(path: str, globs: Iterable[str]) -> bool:
        return any(
            fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(_last(path), glob)
            for glob in globs
        )

    chosen = set()
    for path in paths:
        is_describing = is_beside_weights(path) or _DESCRIBING.fullmatch(_last(path))
        is_included = not selection.include or matches(path, selection.include)
        if is_describing or (
            is_of_preset(path) and is_included and not matches(path, selection.exclude)
        ):
            chosen.add(path)
    return frozenset(chosen)


def is_of_optimizer(path: str) -> bool:
    """Return whether a file holds optimizer states alone, by its name."""
    return (
        _OPTIMIZER.fullmatch(_last(path)) is not None
        or _OPTIMIZER_FOLDER.fullmatch(path) is not None
    )


def is_of_states(path: str) -> bool:
    """Return whether a trainer writes such a file to resume, and never beside its final model."""
    name = _last(path)
    return is_of_optimizer(path) or (
        _FOR_RESUMING.fullmatch(name) is not None and name != "training_args.bin"
    )


def _last(path: str) -> str:
    return path.rpartition("/")[2]
