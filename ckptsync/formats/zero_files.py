"""DeepSpeed's ZeRO files: their names, and what is in them.

Sources: ``deepspeed/runtime/engine.py`` (names, model states), ``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py`` and
``deepspeed/runtime/bf16_optimizer.py`` (optimizer states), 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle
from ckptsync.formats.inert import Build, Made, Name, brief, made
from ckptsync.formats.joining import inside, join
from ckptsync.formats.torch_pickle import Stored
from ckptsync.formats.torch_zip import Archive
from ckptsync.model import Extent, Files, Part

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OTHERS = re.compile(r"expp_rank_.*|layer_\d+.*model_states\.pt|expert_\d+_.*|mp_rank_\d+_\d+_model_states\.pt")

_ALLOWED: Mapping[Name, Build] = {
    **torch_pickle.ALLOWED,
    Name("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): made,
    Name("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): made,
    Name("deepspeed.runtime.zero.config", "ZeroStageEnum"): made,
    Name("deepspeed.utils.tensor_fragment", "fragment_address"): made,
}


@dataclass(frozen=True, slots=True)
class StateFile:
    """One loaded ``*_states.pt``."""

    name: str
    archive: Archive
    content: dict[str, Any]

    def part(self, files: Files, tensor: Any) -> Part:
        """Where one of its tensors lies."""
        if not isinstance(tensor, Stored):
            raise Corrupt(f"{self.name}: something else where a tensor is due")
        return torch_pickle.part(files, self.archive, tensor)

    def get(self, key: str, kind: type[Any]) -> Any:
        """An entry that must be a ``kind``; an empty one if it is absent or None."""
        value = self.content.get(key)
        value = kind() if value is None else value
        if not isinstance(value, kind):
            raise Corrupt(f"{self.name}: {key} is a {type(value).__name__}, {kind.__name__} expected")
        return value


def load(files: Files, name: str) -> StateFile:
    """Read the pickle of one file; raises Incomplete if it is not there."""
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not there", hint="each node writes its own ranks' files: add the directory of the node that ran this rank"
        )
    value, archive = torch_pickle.load(files, Extent(name, 0, files.sizes()[name]), _ALLOWED)
    if not isinstance(value, dict):
        raise Corrupt(f"{name}: a {type(value).__name__}, a dictionary expected")
    return StateFile(name, archive, value)


def is_ours(base: str) -> bool:
    """Whether a file of this name belongs to a ZeRO checkpoint."""
    return any(pattern.fullmatch(base) for pattern in (OPTIM, MODEL_OF_RANK, MODEL))


def of_rank(names: Iterable[str], root: str, pattern: re.Pattern[str]) -> dict[int, str]:
    """Data-parallel rank → file.  Raises Unsupported for more than one model-parallel rank, for experts and for pipelines."""
    found: dict[int, str] = {}
    for base, name in inside(names, root).items():
        match = pattern.fullmatch(base)
        if _OTHERS.fullmatch(base) or (match and int(match[match.lastindex or 1])):
            raise Unsupported(
                f"{name}: tensor, pipeline or expert parallel ranks cannot be joined yet", hint="only mp_rank_00 is read"
            )
        if match:
            found[int(match[1])] = name
    return found


@dataclass(frozen=True, slots=True)
class Setup:
    """``stage`` 0 to 3, the data-parallel ``world`` size, and ``prefix`` of the optimizer files (``bf16_`` or nothing)."""

    stage: int
    world: int
    prefix: str = ""

    def optim(self, root: str) -> list[str]:
        """The optimizer file of every rank, in their order; without ZeRO there is none."""
        ranks = range(self.world if self.stage else 0)
        return [join(root, f"{self.prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt") for r in ranks]


def setup(files: Files, root: str) -> Setup:
    """What any one file here says of the whole; raises Incomplete if none does."""
    optim = of_rank(files.sizes(), root, OPTIM)
    if optim:
        name = optim[min(optim)]
        state = optimizer_state(load(files, name))
        base = name.rpartition("/")[2]
        return Setup(_stage(state), _world(state, name), base[: base.index("zero_pp_rank")])
    return _setup_without_optimizer(files, root)


def optimizer_state(file: StateFile) -> dict[str, Any]:
    """The ZeRO optimizer's own state dict."""
    state = file.content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise Corrupt(f"{file.name}: no optimizer_state_dict")
    return state


def _stage(state: Mapping[str, Any]) -> int:
    """``BF16_Optimizer`` writes none; it partitions as stage 1 does."""
    stage = state.get("zero_stage", 1)
    stage = stage.args[0] if isinstance(stage, Made) and stage.args else stage
    if stage not in (1, 2, 3):
        raise Unsupported(f"ZeRO stage {brief(stage)}: 1, 2 and 3 are known")
    return int(stage)


def _world(state: Mapping[str, Any], name: str) -> int:
    """``partition_count``: a number at stage 3, one for each parameter group at stages 1 and 2."""
    count = state.get("partition_count")
    counts = count if isinstance(count, (list, tuple)) else [count]
    if not counts or any(type(n) is not int or not 0 < n < 1 << 20 for n in counts):
        raise Corrupt(f"{name}: partition_count is {brief(count)}")
    return int(max(counts))


def _setup_without_optimizer(files: Files, root: str) -> Setup:
    """DeepSpeed without ZeRO keeps everything in the model file; with ZeRO-3, a node always has optimizer files too."""
    name = join(root, "mp_rank_00_model_states.pt")
    if name not in files.sizes():
        raise Incomplete(f"{root or '.'}: no file here says how many ranks there are")
    file = load(files, name)
    world = file.content.get("dp_world_size")
    config = file.get("ds_config", dict).get("zero_optimization")
    stage = config.get("stage", 0) if isinstance(config, dict) else 0
    if type(world) is not int or stage not in (0, 1, 2):
        raise Corrupt(f"{name}: dp_world_size {brief(world)}, ZeRO stage {brief(stage)}")
    return Setup(stage, world)
