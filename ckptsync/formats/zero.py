"""DeepSpeed ZeRO-1, 2 and 3: fp32 masters cut over the ranks, and what the model file holds beside them.

Stages 1 and 2 flatten each parameter group and cut it into one partition a rank; stage 3 cuts every parameter into ``ceil(numel / W)``
elements a rank, padded, in flat groups.  Source: ``deepspeed/utils/zero_to_fp32.py``, which this follows, and where that drops weights
(frozen ones at stage 1) or aborts (tied ones), the files themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import zero_masters
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.inert import brief
from ckptsync.formats.joining import inside, join
from ckptsync.formats.torch_pickle import Stored
from ckptsync.formats.zero_files import MODEL, MODEL_OF_RANK, Setup, StateFile, is_ours, load, of_rank, setup
from ckptsync.model import Copy, Files, Shape, Tensor, read_whole

NAME = "zero"


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Directories (DeepSpeed calls them tags) that hold ZeRO files."""
    return tuple(sorted({name.rpartition("/")[0] for name in names if is_ours(name.rpartition("/")[2])}))


def holds_weights(root: str) -> bool:
    """Always."""
    return root is not None


def demands(files: Files, root: str) -> dict[str, int | None]:
    """The files of every rank; only the ranks themselves know their sizes.  Raises Incomplete if nothing here says how many."""
    what = setup(files, root)
    return dict.fromkeys([*_model_names(files, root, what), *what.optim(root)])


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Parameters, buffers and tied names, each with all its stored copies."""
    what = setup(files, root)
    sources = [load(files, name) for name in _model_names(files, root, what)[: None if what.stage == 3 else 1]]
    model = _Model(files, what, sources[0], sources)
    found = {tensor.name: tensor for tensor in (*_trained(model, root), *_frozen(model))}
    found |= {tensor.name: tensor for tensor in _others(model, found)}
    found |= {tensor.name: tensor for tensor in _tied(model, found)}
    if not found:
        raise Unsupported(f"{root or '.'}: a DeepSpeed checkpoint without weights")
    return tuple(found.values())


def world(files: Files, root: str) -> int:
    """How many data-parallel ranks wrote it."""
    return setup(files, root).world


def _model_names(files: Files, root: str, what: Setup) -> list[str]:
    if what.stage < 3:
        of_rank(files.sizes(), root, MODEL)
        return [join(root, "mp_rank_00_model_states.pt")]
    there = of_rank(files.sizes(), root, MODEL_OF_RANK)
    return [there.get(r, join(root, f"zero_pp_rank_{r}_mp_rank_00_model_states.pt")) for r in range(what.world)]


@dataclass(frozen=True, slots=True)
class _Model:
    """``first`` is rank 0's model file: the others repeat it, but for ZeRO-3's fragments of frozen parameters."""

    files: Files
    what: Setup
    first: StateFile
    every: list[StateFile]

    def own(self, name: str) -> Stored | None:
        """The tensor that the model itself has under this name: at stage 3 an empty placeholder of the right dtype."""
        value = self.first.get("module", dict).get(name)
        return value if isinstance(value, Stored) else None

    def own_copies(self, name: str, shape: Shape) -> tuple[Copy, ...]:
        own = self.own(name)
        if own is None or own.shape != shape:
            return ()
        return (Copy(own.dtype, own.shape, (self.first.part(self.files, own),) if own.numel else ()),)


def _shapes(value: Any, name: str) -> dict[str, Shape]:
    if not isinstance(value, dict) or not all(isinstance(k, str) and _is_shape(v) for k, v in value.items()):
        raise Corrupt(f"{name}: param_shapes are not shapes by name")
    return value


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MOST_AXES and all(type(n) is int and n >= 0 for n in value)


def _trained(model: _Model, root: str) -> Iterator[Tensor]:
    """What the optimizer holds: fp32 masters, and at stages 1 and 2 the model's own copy too."""
    if model.what.stage == 0:
        return
    name = model.first.name
    groups = [_shapes(group, name) for group in model.first.get("param_shapes", list)]
    optim = [load(model.files, name) for name in model.what.optim(root)]
    copies = zero_masters.copies(model.files, model.what.stage, optim, groups)
    for shapes in groups:
        for key, shape in shapes.items():
            own = model.own(key)
            stored = model.own_copies(key, shape) if model.what.stage < 3 else ()
            yield Tensor(key, own.dtype if own else copies[key].dtype, shape, (copies[key], *stored))


def _frozen(model: _Model) -> Iterator[Tensor]:
    """Parameters without an optimizer state: at stage 3 a fragment a rank, padded; else whole in the model file."""
    shapes = _shapes(model.first.get("frozen_param_shapes", dict), model.first.name)
    for name, shape in shapes.items():
        copies = model.own_copies(name, shape) if model.what.stage < 3 else ()
        yield _with_copies(name, shape, copies or (_fragments(model, name, shape),))


def _fragments(model: _Model, name: str, shape: Shape) -> Copy:
    held = [file.get("frozen_param_fragments", dict).get(name) for file in model.every]
    if not all(isinstance(fragment, Stored) for fragment in held):
        raise Corrupt(f"{model.first.name}: frozen {name} has no fragment in some rank's file")
    parts = [file.part(model.files, fragment) for file, fragment in zip(model.every, held, strict=True)]
    return zero_masters.from_fragments(name, shape, held[0].dtype, parts)


def _others(model: _Model, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Buffers, and at stage 1 the frozen parameters, which only the model file holds."""
    buffers = {name for name in model.first.get("buffer_names", list) if isinstance(name, str)}
    tied = model.first.get("shared_params", dict)
    for name, value in model.first.get("module", dict).items():
        if not isinstance(value, Stored) or name in found or name in tied:
            continue
        if model.what.stage == 3 and not value.numel and name not in buffers:
            raise Incomplete(f"{model.first.name}: {name} is an empty placeholder, and no rank holds its values")
        yield _with_copies(name, value.shape, model.own_copies(name, value.shape))


def _with_copies(name: str, shape: Shape, copies: tuple[Copy, ...]) -> Tensor:
    return Tensor(name, copies[0].dtype, shape, copies)


def _tied(model: _Model, found: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """``shared_params``: name that is not stored → name that is.

    Where frozen parameters were excluded (Trainer does so with LoRA), names tied to one of them are still mentioned, and left out.
    """
    is_subset = model.first.content.get("frozen_param_shapes") is None
    for name, stored in model.first.get("shared_params", dict).items():
        is_there = isinstance(stored, str) and stored in found
        if not isinstance(name, str) or not (is_there or (is_subset and isinstance(stored, str))):
            raise Corrupt(f"{model.first.name}: {brief(name)} shares its values with {brief(stored)}, which is not there")
        if is_there:
            yield replace(found[stored], name=name, tied=stored)


def preferred(files: Files, found: tuple[str, ...]) -> str | None:
    """The tag that ``latest`` names, if it is among ``found``; the only one; else ``None``."""
    if len(found) == 1:
        return found[0]
    for root in found:
        parent, _, tag = root.rpartition("/")
        pointer = inside(files.sizes(), parent).get("latest")
        if pointer and read_whole(files, pointer, 4096).decode("utf-8", "replace").strip() == tag:
            return root
    return None
