"""The files of a DeepSpeed save: their names and contents, and whether they are of one save.

DeepSpeed names a rank's file by the rank alone, so one that another save left behind has the same
name and, mostly, the same size; `check_agreement` finds it by what it records. Sources:
``deepspeed/runtime/engine.py`` (names, model states, ``_common_checkpoint_state``,
``_save_zero_checkpoint``), ``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py`` and
``deepspeed/runtime/bf16_optimizer.py`` (optimizer states), 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from typing import Any, NamedTuple

from ckptsync.errors import Corrupt, Incomplete, Unsupported, name_in_errors
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.dtypes import MOST_AXES
from ckptsync.formats.pickles import (
    AnyClass,
    Build,
    Name,
    PickledObject,
    all_made,
    brief,
    with_unknown,
)
from ckptsync.formats.torch_pickle import StoredTensor, plain_tensor
from ckptsync.layouts.file_names import MOST_RANKS, inside, join
from ckptsync.tensors import Extent, Files, Part, Shape

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
MODEL_OF_RANK = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt"
)
MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
_EXPERT = re.compile(r"layer_([0-9]+)_expert_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)(?:-model_([0-9]+))?-model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_[0-9]+_mp_rank_[0-9]+_optim_states\.pt")
_KNOWN = (OPTIM, MODEL_OF_RANK, MODEL, _EXPERT, _LAYER, _EXPERT_OPTIM)
_OTHERS = re.compile(
    r"layer_[0-9]+.*model_states\.pt|expert_[0-9]+_.*|mp_rank_[0-9]+_[0-9]+_model_states\.pt"
)
UNIVERSAL = "fp32.pt"
MASTERS = "single_partition_of_fp32_groups"
_MOST_EXPERTS = 1 << 16  # of a layer

ModelTensors = Mapping[str, tuple["StateFile", StoredTensor]]
"""Tensors of the model itself by name, each with the file that holds it."""

_ALLOWED: Mapping[Name, Build] = torch_pickle.Names(
    {
        **torch_pickle.ALLOWED,
        **all_made(
            {
                "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
                "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
                "deepspeed.utils.tensor_fragment": ("fragment_address",),
            }
        ),
    }
)
_ANY_CLASS = AnyClass(_ALLOWED)
# `_common_checkpoint_state` of ``deepspeed/runtime/engine.py``, and what its parallel kinds add
_OF_DEEPSPEED = frozenset(
    [
        *("module", "buffer_names", "optimizer", "param_shapes", "shared_params"),
        *("frozen_param_shapes", "frozen_param_fragments", "ds_config", "ds_version"),
        *("dp_world_size", "mp_world_size", "universal_checkpoint_info", "num_experts"),
        *("ds_autoep_layers", "autoep_layers", "checkpoint_parallel_dims"),
    ]
)

# Pickles


@dataclass(frozen=True, slots=True)
class StateFile:
    """One loaded ``*_states.pt``."""

    files: Files
    name: str
    archive: torch_save.Container
    content: dict[str, Any]

    def part(self, tensor: Any) -> Part:
        """Return where one of its tensors lies."""
        with name_in_errors(self.name):
            stored = plain_tensor(tensor)
        if stored is None:
            raise Corrupt(f"{self.name}: something else where a tensor is due")
        return torch_save.part(self.files, self.archive, stored)

    def get(self, key: str, kind: type[Any]) -> Any:
        """Return an entry that must be a ``kind``; an empty one if it is absent or None."""
        value = self.content.get(key)
        value = kind() if value is None else value
        if not isinstance(value, kind):
            raise Corrupt(
                f"{self.name}: {key} is a {type(value).__name__}, {kind.__name__} expected"
            )
        return value


def load(files: Files, name: str) -> StateFile:
    """Read the pickle of one file."""
    value, archive = _read(files, Extent(name, 0, files.sizes()[name]))
    if not isinstance(value, dict):
        raise Corrupt(f"{name}: a {type(value).__name__}, a dictionary expected")
    return StateFile(files, name, archive, value)


def _read(files: Files, where: Extent) -> tuple[Any, torch_save.Container]:
    """Return what is pickled.

    A script's ``client_state`` lies among DeepSpeed's own entries, with classes of its own: such
    entries are left out.
    """
    try:
        return torch_save.load(files, where, _ALLOWED)
    except Unsupported as refused:
        base = where.file.rpartition("/")[2]
        if not (MODEL.fullmatch(base) or MODEL_OF_RANK.fullmatch(base)):
            raise
        try:
            value, archive = torch_save.load(files, where, _ANY_CLASS)
        except Corrupt:  # it was refused before it was odd
            raise refused from None
        odd = with_unknown(value) if isinstance(value, dict) else _OF_DEEPSPEED
        if odd & _OF_DEEPSPEED:
            raise
        return {key: inner for key, inner in value.items() if key not in odd}, archive


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a part of a configuration, empty if it has none."""
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def configuration(file: StateFile) -> dict[str, Any]:
    """Return DeepSpeed's configuration; empty if the checkpoint has only the name of its file."""
    return section(file.content, "ds_config")


def is_bf16(file: StateFile) -> bool:
    """Return whether DeepSpeed was configured to train in bf16."""
    config = configuration(file)
    return (section(config, "bf16") or section(config, "bfloat16")).get("enabled") is True


def trained_dtype(model: StateFile) -> str:
    """Return what the model trains in, by DeepSpeed's configuration."""
    if is_bf16(model):
        return "BF16"
    return "F16" if section(configuration(model), "fp16").get("enabled") is True else "F32"


def optimizer_state(file: StateFile) -> dict[str, Any]:
    """Return the ZeRO optimizer's own state dict."""
    state = file.content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise Corrupt(f"{file.name}: no optimizer_state_dict")
    return state


def zero_stage(state: Mapping[str, Any]) -> Any:
    """Return the stage that an optimizer's state records, as a number; None if it records none."""
    stage = state.get("zero_stage")
    return stage.args[0] if isinstance(stage, PickledObject) and stage.args else stage


def buffer_names(file: StateFile) -> set[str]:
    """Return ``buffer_names``; what else the list may hold is never hashed."""
    return {name for name in file.get("buffer_names", list) if isinstance(name, str)}


def param_shapes(file: StateFile) -> list[dict[str, Shape]] | None:
    """Return the shapes of the trained parameters by group, in the order of their elements.

    None without ZeRO, and where an older DeepSpeed saved a model with experts (0.16).
    """
    if file.content.get("param_shapes") is None:
        return None
    groups = [shapes_by_name(group, file.name) for group in file.get("param_shapes", list)]
    if sum(map(len, groups)) != len({name for group in groups for name in group}):
        raise Corrupt(f"{file.name}: a parameter is in two parameter groups")
    return groups


def trained_shapes(file: StateFile) -> dict[str, Shape]:
    """Return the shapes of the trained parameters of all groups."""
    return {name: shape for group in param_shapes(file) or () for name, shape in group.items()}


def shapes_by_name(value: Any, name: str) -> dict[str, Shape]:
    """Return a dictionary of shapes; raises Corrupt for anything else."""
    if not isinstance(value, dict) or not all(
        isinstance(k, str) and isinstance(v, tuple) and len(v) <= MOST_AXES and are_naturals(v)
        for k, v in value.items()
    ):
        raise Corrupt(f"{name}: param_shapes are not shapes by name")
    return value


def are_naturals(values: Sequence[Any]) -> bool:
    """Return whether all are integers of at least 0."""
    return all(type(n) is int and n >= 0 for n in values)


def expert_counts(model: StateFile) -> list[int] | None:
    """Return the number of experts of each layer; None if none. Refuses AutoEP's."""
    if model.content.get("ds_autoep_layers") or model.content.get("autoep_layers"):
        raise Unsupported(
            f"{model.name}: experts of AutoEP cannot be merged", hint="convert with ds_to_universal"
        )
    counts = model.content.get("num_experts")
    if counts is None:
        return None
    if (
        not isinstance(counts, list)
        or len(counts) >= _MOST_EXPERTS
        or any(type(n) is not int or not 0 < n < _MOST_EXPERTS for n in counts)
    ):
        raise Corrupt(f"{model.name}: num_experts is {brief(counts)}")
    return counts


# Names


def is_zero_file(base: str) -> bool:
    """Return whether a file of this name belongs to a ZeRO checkpoint."""
    return any(pattern.fullmatch(base) for pattern in (OPTIM, MODEL_OF_RANK, MODEL))


def universal_roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories with ``zero/<parameter>/fp32.pt`` in them: universal checkpoints."""
    parts = (name.rsplit("/", 3) for name in names if name.endswith(f"/{UNIVERSAL}"))
    return tuple(
        sorted({p[0] if p[3:] else "" for p in parts if p[-3:-2] == ["zero"] and len(p) > 2})
    )


class ZeroSetup(NamedTuple):
    """How a save was made: ZeRO stage (0 to 3) and numbers of ranks.

    ``world``: data-parallel ranks; ``mp``: model-parallel ranks, which are pipeline stages times
    tensor-parallel ranks. ``prefix``: of the optimizer files' names (``bf16_`` or nothing).
    """

    stage: int
    world: int
    prefix: str = ""
    mp: int = 1


class ZeroFiles:
    """The files of one save, in the directory ``root`` (DeepSpeed calls it a tag).

    Each pickle is read once. Raises Unsupported for files that DeepSpeed writes and that cannot be
    merged.
    """

    def __init__(self, files: Files, root: str) -> None:
        self.files, self.root, self.sizes = files, root, files.sizes()
        self.title = root or "."
        self._loaded: dict[str, StateFile] = {}
        self._here = inside(self.sizes, root)
        for base, name in self._here.items():
            if _OTHERS.fullmatch(base) and not any(known.fullmatch(base) for known in _KNOWN):
                raise Unsupported(
                    f"{name}: a kind of DeepSpeed file that is not known",
                    hint="convert it with ds_to_universal first",
                )

    def by_rank(self, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
        """Return files by (model-parallel rank, data-parallel rank), without one by rank 0."""
        found: dict[tuple[int, int], str] = {}
        for base, name in self._here.items():
            if match := pattern.fullmatch(base):
                numbers = [int(n or 0) for n in match.groups()]
                if max(numbers) >= MOST_RANKS:
                    raise Corrupt(f"{name}: a rank of {max(numbers)}")
                found[numbers[-1], numbers[0] if numbers[1:] else 0] = name
        return found

    @cached_property
    def setup(self) -> ZeroSetup:
        """What the files here say of the whole; raises Incomplete if none does."""
        optim, mp = self.by_rank(OPTIM), self._model_parallel()
        if not optim:
            return self._setup_of_model(mp)
        name = optim[min(optim)]
        state = optimizer_state(self.load(name))
        # `BF16_Optimizer` writes none
        stage = 1 if "zero_stage" not in state else zero_stage(state)
        if stage not in (1, 2, 3):
            raise Unsupported(f"ZeRO stage {brief(stage)}: 1, 2 and 3 are known")
        # a number at stage 3, one for each parameter group at stages 1 and 2
        count = state.get("partition_count")
        counts = count if isinstance(count, (list, tuple)) else [count]
        if not counts or any(type(n) is not int or not 0 < n < MOST_RANKS for n in counts):
            raise Corrupt(f"{name}: partition_count is {brief(count)}")
        prefix, _, _ = name.rpartition("/")[2].partition("zero_pp_rank")
        return ZeroSetup(int(stage), max(counts), prefix, mp)

    def _setup_of_model(self, mp: int) -> ZeroSetup:
        """Return what a model file says: without ZeRO and in universal checkpoints, it is alone."""
        ranked = self.by_rank(MODEL_OF_RANK)
        models = self.by_rank(MODEL) or ranked
        file = self.load(models[min(models)])
        world = file.content.get("dp_world_size")
        stage = section(configuration(file), "zero_optimization").get("stage", 0)
        if stage == 0 and MASTERS in section(file.content, "optimizer"):
            stage = 1  # `BF16_Optimizer` without ZeRO has its partitions in files of their own, too
        if type(world) is not int or not 0 < world < MOST_RANKS:
            raise Corrupt(f"{file.name}: dp_world_size is {brief(world)}")
        if models is ranked:
            stage = 3
        elif stage not in (0, 1, 2):
            raise Corrupt(f"{file.name}: written by ZeRO stage {brief(stage)}, 0 to 2 expected")
        return ZeroSetup(stage, world, "bf16_" if is_bf16(file) else "", mp)

    def _model_parallel(self) -> int:
        """Return how many model-parallel ranks a model file gives; else how many names show."""
        models = self.by_rank(MODEL) or self.by_rank(MODEL_OF_RANK)
        seen = {mp for mp, _ in [*models, *self.by_rank(OPTIM)]}
        if not seen:
            raise Incomplete(
                f"{join(self.root, 'mp_rank_00_model_states.pt')}: not found, nor another file that"
                " says how many ranks there are",
                hint="add the other nodes' directories; ds_to_universal copies model files last",
            )
        if not models:
            return max(seen) + 1
        name = models[min(models)]
        count = mp_world_size(self.load(name))
        if max(seen) >= count:
            raise Unsupported(
                f"{self.title}: files of {max(seen) + 1} tensor or pipeline parallel ranks,"
                f" {name} says {count}",
                hint=(
                    "they are of different saves: give those of one alone; mp_rank_00 of several is"
                    " not the model"
                ),
            )
        return count

    def optimizer_files(self, mp: int) -> list[str]:
        """Return the optimizer file of every data-parallel rank; none without ZeRO."""
        stem = join(self.root, f"{self.setup.prefix}zero_pp_rank_")
        return [
            f"{stem}{rank}_mp_rank_{mp:02d}_optim_states.pt"
            for rank in range(self.setup.world if self.setup.stage else 0)
        ]

    def model_files(self, mp: int) -> list[str]:
        """Return the model file; at stage 3 that of every data-parallel rank."""
        if self.setup.stage < 3:
            return [join(self.root, f"mp_rank_{mp:02d}_model_states.pt")]
        there, stem = self.by_rank(MODEL_OF_RANK), join(self.root, "zero_pp_rank_")
        return [
            there.get((mp, rank), f"{stem}{rank}_mp_rank_{mp:02d}_model_states.pt")
            for rank in range(self.setup.world)
        ]

    def all_model_files(self) -> list[str]:
        """Return the model files of all ranks."""
        return [name for mp in range(self.setup.mp) for name in self.model_files(mp)]

    def all_optimizer_files(self) -> list[str]:
        """Return the optimizer files of all ranks."""
        return [name for mp in range(self.setup.mp) for name in self.optimizer_files(mp)]

    def layer_files(self) -> dict[str, int]:
        """Return the files of a pipeline's layers in order, with the layers' numbers."""
        numbers: dict[str, int] = {}
        for base, name in self._here.items():
            if match := _LAYER.fullmatch(base):
                if int(match[2] or 0):
                    raise Unsupported(
                        f"{name}: a pipeline whose layers are cut over tensor-parallel ranks cannot"
                        " be merged",
                        hint="nothing in it says how; use Megatron-DeepSpeed's own tools",
                    )
                numbers[name] = int(match[1])
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def named_layer_files(self, parameters: Iterable[str]) -> list[str]:
        """Return the files of layers that have these tensors; of tied modules no name shows it."""
        numbers = {name.partition(".")[0] for name in parameters}
        return [
            join(self.root, f"layer_{int(n):02d}-model_states.pt")
            for n in sorted(numbers)
            if n.isascii() and n.isdecimal() and len(n) < 7
        ]

    def expert_files(self, counts: Sequence[int]) -> dict[str, int]:
        """Return the files of all experts of layers with so many experts, and their numbers."""
        return {
            join(self.root, f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"): expert
            for layer, count in enumerate(counts)
            for expert in range(count)
        }

    def has_experts(self) -> bool:
        """Return whether there are files of experts, or of their optimizer states."""
        return any(_EXPERT.fullmatch(b) or _EXPERT_OPTIM.fullmatch(b) for b in self._here)

    def require(self, names: Sequence[str]) -> None:
        """Raise Incomplete if one of these files is missing."""
        missing = [name for name in names if name not in self.sizes]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise Incomplete(
                f"{missing[0]}{more}: not found, of {len(names)} files that the merge needs",
                hint="each node writes its own ranks' files: add the directory of that node",
            )

    def load(self, name: str) -> StateFile:
        """Return one file's content; raises Incomplete if it is missing."""
        if name not in self._loaded:
            self.require([name])
            self._loaded[name] = load(self.files, name)
        return self._loaded[name]


def mp_world_size(file: StateFile) -> int:
    """Return how many model-parallel ranks a model file says that there are; old ones do not."""
    mp = file.content.get("mp_world_size", 1)
    if type(mp) is not int or not 0 < mp < MOST_RANKS:
        raise Corrupt(f"{file.name}: mp_world_size is {brief(mp)}")
    return mp


# Whether the files are of one save

# what all model files of one save say alike
_OF_A_MODEL = (
    *("global_steps", "global_samples", "skipped_steps"),
    *("dp_world_size", "mp_world_size", "ds_version"),
)
# learning rates are computed on every machine; from step to step they change by far more
_ALIKE = 1e-9


def check_agreement(
    setup: ZeroSetup, models: Sequence[StateFile], ranks: Sequence[Sequence[StateFile]]
) -> None:
    """Raise Corrupt if two files record different values of the same number.

    Raises Unsupported for what another kind of rank wrote. ``ranks``: the optimizer files of each
    model-parallel rank; pipeline stages need not have the same parameter groups.
    """
    _check_alike(models, lambda file: [(key, file.content.get(key)) for key in _OF_A_MODEL])
    for each in ranks:
        _check_alike(each, _of_an_optimizer)
    optim = [file for each in ranks for file in each]
    _check_alike([*models, *optim], lambda file: [("ds_version", file.content.get("ds_version"))])
    for file in models:
        if "module" not in file.content:
            raise Corrupt(f"{file.name}: not a model's states", hint="it is another rank's file")
        if mp_world_size(file) != setup.mp:
            raise Unsupported(
                f"{file.name}: says that there are {mp_world_size(file)} tensor or pipeline"
                f" parallel ranks, {setup.mp} expected by the files here",
                hint="give the files of one save, of every node; mp_rank_00 alone is not the model",
            )
        world = file.content.get("dp_world_size")
        if setup.stage and type(world) is int and world != setup.world:
            raise Corrupt(
                f"{file.name}: dp_world_size is {world}, the optimizer files are of {setup.world}"
                " ranks"
            )
    for file in optim:
        if optimizer_state(file).get("ds_zero_partition_groups"):
            raise Unsupported(
                f"{file.name}: experts of AutoEP cannot be merged",
                hint="convert it with ds_to_universal",
            )
        if (MASTERS in optimizer_state(file)) == (setup.stage == 3):
            raise Corrupt(
                f"{file.name}: not an optimizer state of ZeRO stage {setup.stage}",
                hint="it is of another save",
            )


def _check_alike(
    files: Sequence[StateFile], values: Callable[[StateFile], Iterable[tuple[str, Any]]]
) -> None:
    first: dict[str, tuple[str, Any]] = {}
    for file in files:
        for key, value in values(file):
            name, expected = first.setdefault(key, (file.name, value))
            if not _is_alike(value, expected):
                raise Corrupt(
                    f"{file.name}: {key} is {brief(value)}, {brief(expected)} in {name}",
                    hint="the files are of different saves: give those that one save wrote",
                )


def _is_alike(one: Any, other: Any) -> bool:
    if type(one) is float and type(other) is float:
        return isclose(one, other, rel_tol=_ALIKE)
    are_plain = all(type(value) in (bool, int, float, str) for value in (one, other))
    return not are_plain or bool(one == other)


def _of_an_optimizer(file: StateFile) -> Iterator[tuple[str, Any]]:
    """Yield numbers that are one for all ranks: loss scale, step counts, learning rates."""
    state = optimizer_state(file)
    yield "zero_stage", zero_stage(state)
    counts = state.get("partition_count")
    for number, count in enumerate(counts if isinstance(counts, (list, tuple)) else [counts]):
        yield f"partition_count {number}", count
    scaler = state.get("loss_scaler")
    if isinstance(scaler, PickledObject) and isinstance(scaler.state, dict):
        yield from (
            ("loss_scaler " + key, scaler.state.get(key))
            for key in ("cur_iter", "cur_scale", "last_overflow_iter")
        )
    yield "base_optimizer_state_step", state.get("base_optimizer_state_step")
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups, states = (
        (base.get("param_groups"), base.get("state")) if isinstance(base, dict) else (None, None)
    )
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        if isinstance(group, dict):
            yield from (
                (f"{key} of parameter group {number}", group.get(key))
                for key in ("lr", "step", "weight_decay")
            )
    for number, one in states.items() if isinstance(states, dict) else ():
        if isinstance(one, dict):
            yield f"step of parameter {brief(number)}", one.get("step")


def refuse_offloaded(files: ZeroFiles, model: StateFile) -> None:
    """Raise Unsupported where the files do not hold the fp32 weights, or not how they are cut."""
    config = section(configuration(model), "zero_optimization")
    swap = join(files.root, "offloaded_tensors/")
    if (
        any(name.startswith(swap) for name in files.sizes)
        or section(config, "offload_optimizer").get("device") == "nvme"
    ):
        raise Unsupported(
            f"{files.title}: the optimizer's tensors were offloaded to NVMe, and its files do not"
            " hold them",
            hint=(
                "save again with the optimizer offloaded to the CPU, or with"
                " stage3_gather_16bit_weights_on_model_save"
            ),
        )
    size = config.get("mics_shard_size")
    if type(size) is int and size > 0:
        raise Unsupported(
            f"{files.title}: MiCS shards the parameters over groups of {size} ranks, which cannot"
            " be joined yet",
            hint="save with stage3_gather_16bit_weights_on_model_save",
        )


def why_unlike(model: StateFile) -> str:
    """Return why the model's own weights need not be the fp32 masters rounded.

    Empty if they are, as in plain ZeRO.

    ZenFlow updates masters later than weights; ``quantize_training`` and ``compression_training``
    quantise the weights after each step (``deepspeed/runtime/zenflow``, ``engine.py`` of 0.9);
    ``zero_quantized_weights`` gathers them quantised.
    """
    config = configuration(model)
    zero = section(config, "zero_optimization")
    used = [key for key in ("quantize_training", "compression_training") if config.get(key)]
    used += [key for key in ("zenflow", "zero_quantized_weights") if zero.get(key)]
    return (
        f"trained with {used[0]}: the model's own weights may differ from the fp32 masters, and are"
        " not compared with them"
        if used
        else ""
    )
