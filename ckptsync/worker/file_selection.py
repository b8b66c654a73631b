"""Which files of a checkpoint are sent, by the operator's choice.  Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptsync.layouts.file_names import is_beside_weights, is_of_optimizer, use_of
from ckptsync.tensors import Demands

Preset = Literal["all", "no-optimizer", "weights"]


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
            demands.model or use_of(path) == "resuming"
        )

    def matches(path: str, globs: Iterable[str]) -> bool:
        return any(
            fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path.rpartition("/")[2], glob)
            for glob in globs
        )

    chosen = set()
    for path in paths:
        is_describing = is_beside_weights(path) or use_of(path) == "describing"
        is_included = not selection.include or matches(path, selection.include)
        if is_describing or (
            is_of_preset(path) and is_included and not matches(path, selection.exclude)
        ):
            chosen.add(path)
    return frozenset(chosen)


def is_of_states(path: str) -> bool:
    """Return whether a trainer writes such a file to resume, and never beside its final model."""
    is_for_resuming = use_of(path) == "resuming" and not path.endswith("training_args.bin")
    return is_of_optimizer(path) or is_for_resuming
