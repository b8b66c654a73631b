"""DeepSpeed ZeRO-1, 2 and 3: fp32 masters cut over the ranks, and the model file beside them.

In reading order: `zero_files` (names, content), `zero_weights` (all ranks joined), `zero_agreement`
(whether they are of one save), `zero_mp_rank` (the tensors of one rank), `zero_partitions` (where
elements of masters lie), `zero_experts`, `zero_pipeline`, `zero_tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptsync.errors import Incomplete
from ckptsync.layouts import zero_universal
from ckptsync.layouts.file_names import inside
from ckptsync.layouts.zero_files import (
    OPTIM,
    ZeroFiles,
    expert_counts,
    is_zero_file,
    named_layer_files,
    read_setup,
    trained_shapes,
)
from ckptsync.tensors import Files, Tensor, read_whole


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories (DeepSpeed calls them tags) that hold ZeRO files.

    A universal checkpoint with copies of some is none.
    """
    split = (name.rpartition("/") for name in names)
    found = {root for root, _, base in split if is_zero_file(base)}
    return tuple(sorted(found - set(zero_universal.roots(names))))


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the files of every rank, and of every expert and layer.

    Only the ranks themselves know their sizes.

    Raises Incomplete if nothing here says what the files of all ranks are.
    """
    zero = ZeroFiles(files, root)
    setup = read_setup(zero)
    if setup.stage == 3 and not zero.by_rank(OPTIM):
        # their prefix is a guess without one; demanding a name that nobody writes never ends
        raise Incomplete(f"{root or '.'}: no optimizer file here, which every node has at stage 3")
    models = setup.all_model_files(zero)
    needed = [*models, *setup.all_optimizer_files(zero)]
    if zero.has_experts() and models[0] in zero.sizes:
        needed += zero.expert_files(expert_counts(zero.load(models[0])) or ())
    layers = zero.layer_files()
    if layers:
        stages = [zero.load(name) for name in models if name in zero.sizes]
        names = [name for stage in stages for name in trained_shapes(stage)]
        needed += [*layers, *named_layer_files(root, names)]
    return dict.fromkeys(needed)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return parameters, buffers and tied names, each with all its stored copies."""
    from ckptsync.layouts.zero_weights import read_weights  # noqa: PLC0415  # a merge's alone

    return read_weights(ZeroFiles(files, root))


def world(files: Files, root: str) -> int:
    """Return how many data-parallel ranks wrote it."""
    return read_setup(ZeroFiles(files, root)).world


def preferred(files: Files, found: tuple[str, ...]) -> str | None:
    """Return the tag that ``latest`` names, if it is among ``found``; the only one; else None."""
    if len(found) == 1:
        return found[0]
    for root in found:
        parent, _, tag = root.rpartition("/")
        pointer = inside(files.sizes(), parent).get("latest")
        if pointer and read_whole(files, pointer, 4096).decode("utf-8", "replace").strip() == tag:
            return root
    return None
