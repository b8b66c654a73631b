"""Whole models as ``torch.save`` writes them: ``pytorch_model.bin``, numbered files with an index, accelerate's ``pytorch_model_fsdp.bin``.

A root is the name without ``.bin``: ``pytorch_model``, ``model/pytorch_model_fsdp_1``.  Sources: ``save_pretrained(safe_serialization=False)`` of
transformers 4, ``save_fsdp_model`` of accelerate (FULL_STATE_DICT).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptsync.errors import CkptsyncError, Corrupt, Unsupported
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import Build, Name, brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.names import home, inside, join
from ckptsync.model import Copy, Extent, Files, Tensor, read_whole
from ckptsync.parsing import parse
from ckptsync.paths import checked_path

NAME = "bin"
_INDEX = ".bin.index.json"
_SINGLE = re.compile(r"(pytorch_model|pytorch_model_fsdp(?:_[0-9]+)?)\.bin(?:\.index\.json)?")
_NUMBERED = re.compile(r"(pytorch_model)-([0-9]{5})-of-([0-9]{5})\.bin")
_WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
ALLOWED: Mapping[Name, Build] = {**torch_pickle.ALLOWED}


def roots(names: Collection[str]) -> tuple[str, ...]:
    """The models in the checkpoint's own directory, else in the one in it that has some, by the beginnings of their files' names."""
    return tuple(sorted(join(at, stem) for at in home(names, _stems) for stem in _stems(inside(names, at))))


def _stems(names: Iterable[str]) -> set[str]:
    matches = (_SINGLE.fullmatch(name) or _NUMBERED.fullmatch(name) for name in names)
    return {match[1] for match in matches if match}


def holds_weights(root: str) -> bool:
    """Always: optimizers and the like have other names."""
    return root != ""


def demands(files: Files, root: str) -> dict[str, int | None]:
    """The files of the model, and the index where there is one; their sizes are only known to themselves."""
    names = files.sizes()
    if root + _INDEX in names:
        return dict.fromkeys((root + _INDEX, *sorted(set(_weight_map(files, root).values()))))
    at, _, stem = root.rpartition("/")
    counts = {int(m[3]) for m in map(_NUMBERED.fullmatch, inside(names, at)) if m and m[1] == stem}
    if len(counts) > 1:
        raise Corrupt(f"{root}: numbered model files of {len(counts)} different sets")
    if counts and f"{root}.bin" not in names:
        total = counts.pop()
        return {f"{root}-{n:05d}-of-{total:05d}.bin": None for n in range(1, total + 1)}
    return {f"{root}.bin": None}


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Every tensor of every file; an index must name exactly these."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name in demands(files, root):
        for tensor in of_file(files, name) if name.endswith(".bin") else ():
            if tensor.name in found:
                raise Corrupt(f"{name}: {tensor.name} is also in {found[tensor.name][0]}")
            found[tensor.name] = (name, tensor)
    if root + _INDEX in files.sizes():
        _check_index(root, _weight_map(files, root), {key: file for key, (file, _) in found.items()})
    return tuple(tensor for _, tensor in found.values())


def of_file(files: Files, name: str) -> tuple[Tensor, ...]:
    """The tensors that one ``torch.save`` of a state dict wrote; names that view the same elements are tied."""
    try:
        value, container = torch_save.load(files, Extent(name, 0, files.sizes()[name]), ALLOWED)
        return of_state(files, container, _state(value))
    except (Corrupt, Unsupported) as e:
        raise _named(e, name) from e


def of_state(files: Files, container: torch_save.Container, value: Mapping[Any, Any]) -> tuple[Tensor, ...]:
    """The tensors of a state dict that lies in ``container``."""
    state = {key: held for key, held in value.items() if isinstance(held, Stored)}
    if not all(type(key) is str for key in state):
        raise _no_names()
    return tuple(_tied(_tensors(files, container, state), state))


def _state(value: Any) -> Mapping[Any, Any]:
    """The state dict itself, or the one dictionary of tensors in it, under a name that trainers use."""
    if not isinstance(value, dict):
        raise Unsupported(f"a {type(value).__name__}, a state dict expected", hint="save model.state_dict()")
    nested = {key: held for key, held in value.items() if isinstance(held, dict) and _has_tensors(held)}
    if not nested:
        return value
    loose = any(isinstance(held, Stored) for held in value.values())
    if loose or len(nested) > 1 or not nested.keys() <= set(_WRAPPERS):
        raise Unsupported(
            f"tensors in several dictionaries ({brief(next(iter(nested)))} among them): nothing says which is the model"
        )
    return next(iter(nested.values()))


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    """Whether tensors lie in it at any depth; each dictionary is looked at once."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        at = waiting.pop()
        if isinstance(at, Stored):
            return True
        if isinstance(at, (dict, list, tuple)) and id(at) not in seen:
            seen.add(id(at))
            waiting.extend(at.values() if isinstance(at, dict) else at)
    return False


def _tensors(files: Files, container: torch_save.Container, state: Mapping[str, Stored]) -> Iterator[Tensor]:
    for key, stored in state.items():
        part = torch_save.part(files, container, stored)
        yield Tensor(key, stored.dtype, stored.shape, (Copy(stored.dtype, stored.shape, (part,)),))


def _tied(found: Iterable[Tensor], state: Mapping[str, Stored]) -> Iterator[Tensor]:
    owners: dict[Stored, str] = {}
    for tensor in found:
        owner = owners.setdefault(state[tensor.name], tensor.name) if state[tensor.name].numel else tensor.name
        yield tensor if owner == tensor.name else replace(tensor, tied=owner)


def _weight_map(files: Files, root: str) -> dict[str, str]:
    """Tensor → file.  Names come from anyone."""
    name = root + _INDEX
    try:
        weight_map = parse(read_whole(files, name), name, "an index")["weight_map"]
        return {str(key): _shard_name(name, value) for key, value in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as e:
        raise Corrupt(f"{name}: not an index: {type(e).__name__}: {e}") from e


def _shard_name(index: str, value: str) -> str:
    if "/" in checked_path(value) or not value.endswith(".bin"):
        raise Corrupt(f"{index}: {value!r:.100} is not a file beside it")
    return join(index.rpartition("/")[0], value)


def _check_index(root: str, told: dict[str, str], found: dict[str, str]) -> None:
    odd = sorted(key for key in told.keys() | found.keys() if told.get(key) != found.get(key))
    if odd:
        raise Corrupt(f"{root}{_INDEX}: {len(odd)} tensors are not where it says, such as {odd[0]}")


def _no_names() -> CkptsyncError:
    return Unsupported("tensors under keys that are no names", hint="a state dict is expected: an optimizer's has numbers")


def _named(error: CkptsyncError, what: str) -> CkptsyncError:
    return error if str(error).startswith(what) else type(error)(f"{what}: {error}", hint=error.hint)
