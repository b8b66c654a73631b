"""Decides which files of a checkpoint are sent, by the operator's choice.  Pure.

Optimizer states are two thirds of a checkpoint, and who only evaluates models does not need them.
So a preset, and globs, leave files out.  Files that describe the others are always sent, and so are
weights that the layout demands, whatever file they lie in: what is left is still a whole model.
"""

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
    """The operator's choice: files of ``preset`` that match ``include`` and not ``exclude``.

    Both are globs of a path in the checkpoint, or of its last part; no ``include`` means all files.
    Small files that describe the others are always sent.
    """

    preset: Preset = "all"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def is_everything(self) -> bool:
        """Return whether no file is left out."""
        return self == EVERYTHING


EVERYTHING = Selection()


def select(paths: Iterable[str], selection: Selection, demands: Demands) -> frozenset[str]:
    """Return the paths to send.

    Configurations, tokenizers and other files that describe the checkpoint are always among them.
    ``demands``: what the layout of the whole checkpoint demands, as far as this node can tell.
    Optimizer states from which alone a model can be made (ZeRO-3 without gathered weights) count as
    weights.
    """

    def is_of_preset(path: str) -> bool:
        """Return whether the preset includes this file: all do what the layout's model demands.

        Else ``all`` includes everything, ``no-optimizer`` all but optimizer states, and ``weights``
        nothing; but all that is not for resuming if ``demands`` names no model.
        """
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
        """Return whether a path or its last part matches one of the globs."""
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
