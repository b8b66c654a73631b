"""Whole models as ``save_pretrained`` writes them: ``model.safetensors``, or numbered files with an index."""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptsync.errors import Corrupt
from ckptsync.formats import safetensors
from ckptsync.layouts.names import home, inside, join
from ckptsync.model import Files, Tensor, read_whole
from ckptsync.parsing import parse
from ckptsync.paths import checked_path

NAME = "whole"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")


def roots(names: Collection[str]) -> tuple[str, ...]:
    """The checkpoint's own directory if it holds a model, else the one in it that does."""
    return home(names, lambda own: SINGLE in own or INDEX in own or any(map(_NUMBERED.fullmatch, own)))


def holds_weights(root: str) -> bool:
    """Always."""
    return root is not None


def demands(files: Files, root: str) -> dict[str, int | None]:
    """The files of the model, and the index where there is one; their sizes are only known to themselves."""
    names = inside(files.sizes(), root)
    if INDEX in names:
        return dict.fromkeys((join(root, INDEX), *sorted(set(_weight_map(files, root).values()))))
    counts = {int(m[2]) for m in map(_NUMBERED.fullmatch, names) if m}
    if len(counts) > 1:
        raise Corrupt(f"{root or '.'}: numbered model files of {len(counts)} different sets")
    if counts and SINGLE not in names:
        total = counts.pop()
        return {join(root, f"model-{n:05d}-of-{total:05d}.safetensors"): None for n in range(1, total + 1)}
    return {join(root, SINGLE): None}


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Every tensor of every file; an index must name exactly these."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name in demands(files, root):
        for tensor in safetensors.tensors(files, name) if name.endswith(".safetensors") else ():
            if tensor.name in found:
                raise Corrupt(f"{name}: {tensor.name} is also in {found[tensor.name][0]}")
            found[tensor.name] = (name, tensor)
    if INDEX in inside(files.sizes(), root):
        _check_index(_weight_map(files, root), {key: file for key, (file, _) in found.items()})
    return tuple(tensor for _, tensor in found.values())


def _weight_map(files: Files, root: str) -> dict[str, str]:
    """Tensor → file.  Names are joined to a directory, and come from anyone."""
    name = join(root, INDEX)
    try:
        weight_map = parse(read_whole(files, name), name, "an index")["weight_map"]
        return {str(key): join(root, _shard_name(name, value)) for key, value in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as e:
        raise Corrupt(f"{name}: not an index: {type(e).__name__}: {e}") from e


def _shard_name(index: str, value: str) -> str:
    if "/" in checked_path(value) or not value.endswith(".safetensors"):
        raise Corrupt(f"{index}: {value!r:.100} is not a file beside it")
    return value


def _check_index(told: dict[str, str], found: dict[str, str]) -> None:
    if told != found:
        odd = sorted(key for key in told.keys() | found.keys() if told.get(key) != found.get(key))
        raise Corrupt(f"{INDEX}: {len(odd)} tensors are not where it says, such as {odd[0]}")
