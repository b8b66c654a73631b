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
from ckptsync.layouts import zero_slices
from ckptsync.layouts.names import join
from ckptsync.layouts.zero_files import LAYER, StateFile, load, of_rank, section
from ckptsync.layouts.zero_rank import groups_of
from ckptsync.model import Files, Shape

REMARK = "the names are those of DeepSpeed's PipelineModule: numbers of layers, and tied_modules"
_TIED = "tied_modules."

Held = dict[str, tuple[StateFile, Stored]]
Told = dict[str, Shape | int]


def is_there(files: Files, root: str) -> bool:
    """Whether there are files of layers."""
    return bool(of_rank(files.sizes(), root, LAYER))


def names(files: Files, root: str) -> list[str]:
    """The files of the layers that are here; raises Unsupported if layers are cut over tensor-parallel ranks."""
    found = sorted(of_rank(files.sizes(), root, LAYER).items(), key=lambda item: _numbers(item[1]))
    odd = next((name for _, name in found if _numbers(name)[1]), None)
    if odd is not None:
        raise Unsupported(
            f"{odd}: a pipeline whose layers are cut over tensor-parallel ranks cannot be joined",
            hint="nothing in it says how; Megatron-DeepSpeed's own tools know",
        )
    return [name for _, name in found]


def told(model: StateFile, optim: Sequence[StateFile]) -> Told:
    """The parameters that one stage names: with their shapes under ZeRO, with their elements as ``BF16_Optimizer`` tells them alone."""
    groups = groups_of(model)
    if groups is not None:
        return {name: shape for shapes in groups for name, shape in shapes.items()}
    found: dict[str, Shape | int] = {}
    for file in optim:
        for group in zero_slices.count(file):
            for name, (_, numel) in (zero_slices.slices(file, group) or {}).items():
                found[name] = numel + int(found.get(name, 0))  # type: ignore[arg-type]
    return found


def wanted(root: str, names_: Iterable[str]) -> list[str]:
    """The files of the layers that have these tensors; of tied modules no name tells."""
    numbers = {name.partition(".")[0] for name in names_}
    return [
        join(root, f"layer_{int(n):02d}-model_states.pt") for n in sorted(numbers) if n.isascii() and n.isdecimal() and len(n) < 7
    ]


def weights(files: Files, root: str, told: Mapping[str, Shape | int], buffers: Sequence[str], models: Sequence[StateFile]) -> Held:
    """Every layer's tensors under ``PipelineModule``'s names.  ``told`` are the parameters that the stages name, and their shapes.

    Raises Incomplete if a layer that is named has no file, Unsupported if nothing can prove that all files are here.
    """
    layers = {_numbers(name)[0]: load(files, name) for name in names(files, root)}
    known = {*told, *buffers}
    found: Held = {}
    for n, file in layers.items():
        tensors = _tensors(file)
        prefix = f"{n}." if any(f"{n}.{key}" in known for key in tensors) else _tied(n, tensors, told, known)
        for key, value in tensors.items():
            _check_same(files, found.get(prefix + key), file, value)
            found.setdefault(prefix + key, (file, value))
    lost = sorted(name for name in known if name not in found)
    if lost:
        raise Incomplete(
            f"{next(iter(wanted(root, lost)), root or '.')}: not there; {len(lost)} tensors, such as {lost[0]}, are in no layer's file",
            hint="each node writes the files of its own layers: add the other nodes' directories",
        )
    if not told:
        _prove_whole(root, models, found, set(buffers))
    return found


def _numbers(name: str) -> tuple[int, int]:
    match = LAYER.fullmatch(name.rpartition("/")[2])
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _tensors(file: StateFile) -> dict[str, Stored]:
    odd = next((key for key, value in file.content.items() if not isinstance(key, str) or not isinstance(value, Stored)), None)
    if odd is not None:
        raise Unsupported(f"{file.name}: {brief(odd)} is no tensor: a layer's file as nothing here reads it")
    return file.content


def _tied(number: int, tensors: Mapping[str, Stored], told: Mapping[str, Shape | int], known: set[str]) -> str:
    """The prefix of the one tied module that has just these names and shapes; a file whose layer trains nothing keeps its number."""
    keys = sorted({name.split(".")[1] for name in known if name.startswith(_TIED)})
    fits = [key for key in keys if _fits(f"{_TIED}{key}.", tensors, told, known)]
    if len(fits) > 1:
        raise Unsupported(
            f"layer {number}: tied modules {', '.join(fits)} have the same shapes, and nothing says which one it is",
            hint="save the model itself from the training program",
        )
    return f"{_TIED}{fits[0]}." if fits else f"{number}."


def _fits(prefix: str, tensors: Mapping[str, Stored], told: Mapping[str, Shape | int], known: set[str]) -> bool:
    mine = {name.removeprefix(prefix) for name in known if name.startswith(prefix)}
    return mine <= tensors.keys() and all(told.get(prefix + k, t.shape) in (t.shape, t.numel) for k, t in tensors.items())


def _check_same(files: Files, one: tuple[StateFile, Stored] | None, file: StateFile, value: Stored) -> None:
    """A tied module that two layers' files hold: the same bytes, as their CRC32s tell."""
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
    """A remark on layers that have no file, which is right for functions; of frozen layers nothing else tells."""
    there = {_numbers(name)[0] for name in names(files, root)}
    missing = [n for n in range(max(there, default=0)) if n not in there]
    return (
        f"layers {', '.join(map(str, missing[:20]))} have no file: right if they are functions, without weights" if missing else ""
    )


def _prove_whole(root: str, models: Sequence[StateFile], found: Held, buffers: set[str]) -> None:
    """Where no parameter is named: what the stages' optimizers train is, one after the other, what the layers' files hold."""
    held = [value.shape for name, (_, value) in found.items() if name not in buffers]
    trained = [shape for model in models for shape in _trained(model)]
    same = len(trained) == len(held) and all(t is None or t == h for t, h in zip(trained, held, strict=True))
    if not trained or not same:
        raise Unsupported(
            f"{root or '.'}: the optimizers train {len(trained)} parameters, the layers' files hold {len(held)}, and nothing names them",
            hint="is a layer's file missing? With tied or frozen layers only ZeRO or bf16 checkpoints say which are all",
        )


def _trained(model: StateFile) -> Iterator[Shape | None]:
    """The shape of each parameter that a plain torch optimizer trains, in its order; ``None`` where it has no state of that shape."""
    state = section(model.content, "optimizer")
    groups: Any = state.get("param_groups")
    states: dict[Any, Any] = section(state, "state")
    for group in groups if isinstance(groups, list) else []:
        listed = group.get("params") if isinstance(group, dict) else None
        for number in listed if isinstance(listed, list) else []:
            if type(number) is not int:
                raise Corrupt(f"{model.name}: a parameter {brief(number)} of the optimizer")
            shapes = [v.shape for v in _dictionary(states.get(number)).values() if isinstance(v, Stored) and v.shape]
            yield max(shapes, key=prod) if shapes else None


def _dictionary(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}
