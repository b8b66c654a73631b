"""Files of one rank each: their names, and what one of them holds.

``<model>_rank<R>.bin`` of accelerate 1.15 (``save_fsdp_model``, ``use_dcp=False``; LOCAL_STATE_DICT of every version has the same names),
``model_world_size_<W>_rank_<R>.pt`` of verl (``FSDPCheckpointManager.save_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import Build, Name, brief, made
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import dtensor, sharded_tensor, wrapped
from ckptsync.layouts.names import inside
from ckptsync.layouts.wrapped import Share, Wrapped
from ckptsync.model import Extent, Files, Part

_NAME = re.compile(
    r"((?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?)_rank([0-9]+)\.bin|(model|optim|extra_state)_world_size_([0-9]+)_rank_([0-9]+)\.pt"
)
_MODEL = re.compile(r"pytorch_model_fsdp(_[0-9]+)?|model")

ALLOWED: Mapping[Name, Build] = {
    **torch_pickle.ALLOWED,
    **dtensor.ALLOWED,
    **sharded_tensor.ALLOWED,
    wrapped.FROM_TYPE: wrapped.rebuilt,
    wrapped.SUBCLASS: made,
}


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file's name taken apart; ``stem`` is what all ranks' names begin with, ``world`` is None where the name does not say."""

    stem: str
    rank: int
    world: int | None

    def of(self, rank: int) -> str:
        """The same file of another rank."""
        return f"{self.stem}_rank{rank}.bin" if self.world is None else f"{self.stem}_world_size_{self.world}_rank_{rank}.pt"


def rank_file(name: str) -> RankFile | None:
    """None for files that are not of one rank each."""
    folder, slash, base = name.rpartition("/")
    found = _NAME.fullmatch(base)
    if found is None:
        return None
    stem = f"{folder}{slash}{found[1] or found[3]}"
    return RankFile(stem, int(found[2] or found[5]), int(found[4]) if found[4] else None)


def of_stem(names: Collection[str], stem: str) -> list[tuple[RankFile, str]]:
    """The files of all ranks that are here, in the order of the ranks."""
    there = ((rank_file(name), name) for name in inside(names, stem.rpartition("/")[0]).values())
    return sorted(((found, name) for found, name in there if found and found.stem == stem), key=lambda f: (f[0].rank, f[1]))


def is_model(stem: str) -> bool:
    """Whether it holds weights; the others are for resuming."""
    return bool(_MODEL.fullmatch(stem.rpartition("/")[2]))


Held = Share | Stored


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank's file holds: of sharded tensors its share, plain ones as they are."""

    name: str
    rank: int
    container: Any
    tensors: dict[str, Held]

    def part(self, files: Files, tensor: Stored) -> Part:
        """Where a tensor's elements lie."""
        return torch_save.part(files, self.container, tensor)


def load(files: Files, name: str, rank: int) -> Loaded:
    """Read the pickle of one file.  Raises Incomplete if it is not here, Corrupt if it is another rank's under this name."""
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not there", hint="each rank writes a file of its own: add the directory of the node that ran this rank"
        )
    try:
        value, container = torch_save.load(files, Extent(name, 0, files.sizes()[name]), ALLOWED)
        tensors = dict(_tensors(value))
        _check_rank(tensors, rank)
    except (Corrupt, Unsupported) as e:
        raise _named(e, name) from e
    return Loaded(name, rank, container, tensors)


def _check_rank(tensors: Mapping[str, Held], rank: int) -> None:
    strangers = {held.rank for held in tensors.values() if isinstance(held, Share)} - {rank}
    if strangers:
        raise Corrupt(f"rank {min(strangers)} wrote it", hint="files were renamed, or come from different saves")


def _tensors(value: Any) -> Iterator[tuple[str, Held]]:
    if not isinstance(value, dict):
        raise Corrupt(f"a {type(value).__name__}, a state dict expected")
    known = dtensor.Meshes()
    for key, held in value.items():
        if isinstance(held, dict):
            raise Unsupported(f"{brief(key)} is a dictionary, a tensor expected", hint="only flat state dicts are read")
        if isinstance(held, (Stored, Wrapped)):
            if not isinstance(key, str):
                raise Corrupt(f"a tensor named {brief(key)}, a text expected")
            yield key, _held(key, held, known)


def _held(key: str, value: Stored | Wrapped, known: dtensor.Meshes) -> Held:
    if key.rpartition(".")[2] == "_flat_param":
        raise Unsupported(
            "FSDP's LOCAL_STATE_DICT: flattened parameters, whose names and shapes are not in the files",
            hint="save with SHARDED_STATE_DICT or FULL_STATE_DICT; these files load only into the same model, wrapped the same way",
        )
    if isinstance(value, Stored):
        return value
    try:
        if value.kind in dtensor.KINDS:
            return dtensor.share(value, known)
        if value.kind == sharded_tensor.KIND:
            return sharded_tensor.share(value)
    except (Corrupt, Unsupported) as e:
        raise _named(e, key) from e
    raise Unsupported(f"{key}: a {value.kind}, DTensor and ShardedTensor are known")


def _named(error: CkptsyncError, what: str) -> CkptsyncError:
    return type(error)(f"{what}: {error}", hint=error.hint)
