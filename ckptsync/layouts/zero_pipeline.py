"""DeepSpeed's pipelines: one file for each layer, without names, and the model files of the stages, with names and without weights.

``PipelineModule`` names layer 3's parameters ``3.<name>``; a module that several layers share is ``tied_modules.<key>`` instead, and
its layers' files do not say so.  Where the stages name their parameters (ZeRO and ``BF16_Optimizer`` do), a file is matched with a tied
module if only one can be meant.  Sources: ``save_state_dict`` and ``_build`` of ``deepspeed/runtime/pipe/module.py``, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import zero_masters
from ckptsync.layouts.names import join
from ckptsync.layouts.zero_files import LAYER, StateFile, buffers, load, of_rank, section
from ckptsync.layouts.zero_rank import Held, groups_of
from ckptsync.model import Files, Shape

REMARK = "the names are those of DeepSpeed's PipelineModule: numbers of layers, and tied_modules"
_TIED = "tied_modules."

Parameters = Mapping[str, Shape | int]


def is_there(files: Files, root: str) -> bool:
    """Return whether there are files of layers."""
    return bool(of_rank(files.sizes(), root, LAYER))


def names(files: Files, root: str) -> list[str]:
    """Return the files of the layers that are here; raises Unsupported if layers are cut over tensor-parallel ranks."""
    found = sorted(of_rank(files.sizes(), root, LAYER).items(), key=lambda item: _numbers(item[1]))
    odd = next((name for _, name in found if _numbers(name)[1]), None)
    if odd is not None:
        raise Unsupported(
            f"{odd}: a pipeline whose layers are cut over tensor-parallel ranks cannot be joined",
            hint="nothing in it says how; Megatron-DeepSpeed's own tools know",
        )
    return [name for _, name in found]


def parameters(model: StateFile, optim: Sequence[StateFile]) -> Parameters:
    """Return the parameters that one stage names: with their shapes under ZeRO, with their elements as ``BF16_Optimizer`` tells them alone."""
    groups = groups_of(model)
    if groups is not None:
        return {name: shape for shapes in groups for name, shape in shapes.items()}
    found: dict[str, Shape | int] = {}
    for file in optim:
        for group in zero_masters.group_numbers(file):
            for name, (_, numel) in (zero_masters.slices(file, group) or {}).items():
                found[name] = numel + int(found.get(name, 0))  # type: ignore[arg-type]
    return found


def wanted(root: str, names_: Iterable[str]) -> list[str]:
    """Return the files of the layers that have these tensors; of tied modules no name shows it."""
    numbers = {name.partition(".")[0] for name in names_}
    return [
        join(root, f"layer_{int(n):02d}-model_states.pt") for n in sorted(numbers) if n.isascii() and n.isdecimal() and len(n) < 7
    ]


def weights(files: Files, root: str, known: Parameters, models: Sequence[StateFile]) -> Held:
    """Return every layer's tensors under ``PipelineModule``'s names. ``known`` are the parameters that the stages name.

    Raises Incomplete if a layer that is named has no file, Unsupported if nothing can prove that all files are here.
    """
    of_buffers = set().union(*map(buffers, models))
    named = {*known, *of_buffers}
    found: dict[str, tuple[StateFile, Stored]] = {}
    for name in names(files, root):
        number, file = _numbers(name)[0], load(files, name)
        odd = next((k for k, v in file.content.items() if not isinstance(k, str) or not isinstance(v, Stored)), None)
        if odd is not None:
            raise Unsupported(f"{file.name}: {brief(odd)} is no tensor: a layer's file as nothing here reads it")
        is_named = any(f"{number}.{key}" in named for key in file.content)
        prefix = f"{number}." if is_named else _tied_prefix(number, file.content, known, named)
        for key, value in file.content.items():
            _check_same(files, found.get(prefix + key), file, value)
            found.setdefault(prefix + key, (file, value))
    lost = sorted(name for name in named if name not in found)
    if lost:
        raise Incomplete(
            f"{next(iter(wanted(root, lost)), root or '.')}: not there; {len(lost)} tensors, such as {lost[0]}, are in no layer's file",
            hint="each node writes the files of its own layers: add the other nodes' directories",
        )
    if not known:
        _prove_whole(root, models, [value.shape for name, (_, value) in found.items() if name not in of_buffers])
    return found


def _numbers(name: str) -> tuple[int, int]:
    match = LAYER.fullmatch(name.rpartition("/")[2])
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _tied_prefix(number: int, tensors: Mapping[str, Stored], known: Parameters, named: set[str]) -> str:
    """Return the prefix of the one tied module that has just these names and shapes; a layer that trains nothing keeps its number."""
    fits = []
    for key in sorted({name.split(".")[1] for name in named if name.startswith(_TIED)}):
        prefix = f"{_TIED}{key}."
        own = {name.removeprefix(prefix) for name in named if name.startswith(prefix)}
        if own <= tensors.keys() and all(known.get(prefix + k, t.shape) in (t.shape, t.numel) for k, t in tensors.items()):
            fits.append(key)
    if len(fits) > 1:
        raise Unsupported(
            f"layer {number}: tied modules {', '.join(fits)} have the same shapes, and nothing says which one it is",
            hint="save the model itself from the training program",
        )
    return f"{_TIED}{fits[0]}." if fits else f"{number}."


def _check_same(files: Files, one: tuple[StateFile, Stored] | None, file: StateFile, value: Stored) -> None:
    """Raise Unsupported unless a tied module that two layers' files hold has the same bytes, as their CRC32s show."""
    if one is None or not value.numel:
        return
    sums = [
        part.checksum and (part.checksum.crc32, part.extent.size) for part in (one[0].part(files, one[1]), file.part(files, value))
    ]
    if sums[0] != sums[1] or sums[0] is None:
        raise Unsupported(
            f"{file.name}: has the names and shapes of a tied module that {one[0].name} holds, and other values",
            hint="a frozen layer beside tied ones? Nothing in the checkpoint tells them apart: save the model itself",
        )


def gaps(files: Files, root: str) -> str:
    """Return a remark on layers that have no file, which is right for functions; of frozen layers nothing else shows it."""
    there = {_numbers(name)[0] for name in names(files, root)}
    missing = [n for n in range(max(there, default=0)) if n not in there]
    return (
        f"layers {', '.join(map(str, missing[:20]))} have no file: right if they are functions, without weights" if missing else ""
    )


def _prove_whole(root: str, models: Sequence[StateFile], held: Sequence[Shape]) -> None:
    """Raise Unsupported unless the layers' files hold, one after the other, what the stages' optimizers train.

    This is for pipelines of which no parameter is named.
    """
    trained = [shape for model in models for shape in _trained(model)]
    same = len(trained) == len(held) and all(t is None or t == h for t, h in zip(trained, held, strict=True))
    if not trained or not same:
        raise Unsupported(
            f"{root or '.'}: the optimizers train {len(trained)} parameters, the layers' files hold {len(held)}, and nothing names them",
            hint="is a layer's file missing? With tied or frozen layers only ZeRO or bf16 checkpoints say which are all",
        )


def _trained(model: StateFile) -> Iterator[Shape | None]:
    """Yield the shape of each parameter that a plain torch optimizer trains, in its order; None where it has no state of that shape."""
    state = section(model.content, "optimizer")
    groups, states = state.get("param_groups"), section(state, "state")
    for group in groups if isinstance(groups, list) else []:
        numbers = group.get("params") if isinstance(group, dict) else None
        for number in numbers if isinstance(numbers, list) else []:
            if type(number) is not int:
                raise Corrupt(f"{model.name}: a parameter {brief(number)} of the optimizer")
            own: Any = states.get(number)  # type: ignore[call-overload]
            shapes = [v.shape for v in own.values() if isinstance(v, Stored) and v.shape] if isinstance(own, dict) else []
            yield max(shapes, key=prod) if shapes else None
