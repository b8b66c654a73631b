"""The files of a DeepSpeed save: their names and contents, and whether they are of one save.

DeepSpeed names a rank's file by the rank alone, so a file of an older save has the same name and,
mostly, the same size; `check_agreement` finds it by the numbers that it records. `ZeroFiles` lists
the files that a save should have, and loads each once.

Sources: ``deepspeed/runtime/engine.py`` (names, model states, ``_common_checkpoint_state``,
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
        """Return where one of its tensors lies.

        Raise Corrupt if ``tensor`` is none, Unsupported if it is not plain.
        """
        with name_in_errors(self.name):
            stored = plain_tensor(tensor)
        if stored is None:
            raise Corrupt(f"{self.name}: something else where a tensor is due")
        return torch_save.part(self.files, self.archive, stored)

    def get(self, key: str, kind: type[Any]) -> Any:
        """Return an entry, or an empty ``kind`` if it is absent or None.

        Raise Corrupt for another type.
        """
        value = self.content.get(key)
        value = kind() if value is None else value
        if not isinstance(value, kind):
            raise Corrupt(
                f"{self.name}: {key} is a {type(value).__name__}, {kind.__name__} expected"
            )
        return value


def load(files: Files, name: str) -> StateFile:
    """Return one file with its unpickled content.

    Raise Corrupt if it is no dictionary or damaged, Unsupported if its pickle names an unknown
    class; entries of a model file that a script added with such classes are left out.
    """
    value, archive = _read(files, Extent(name, 0, files.sizes()[name]))
    if not isinstance(value, dict):
        raise Corrupt(f"{name}: a {type(value).__name__}, a dictionary expected")
    return StateFile(files, name, archive, value)


def _read(files: Files, extent: Extent) -> tuple[Any, torch_save.Container]:
    """Return the unpickled content, and its container; raises as `load`.

    A script's ``client_state`` lies among DeepSpeed's own entries of a model file, with classes of
    its own: such entries are left out. Unknown names elsewhere raise Unsupported.
    """
    try:
        return torch_save.load(files, extent, _ALLOWED)
    except Unsupported as refused:
        base = extent.file.rpartition("/")[2]
        if not (MODEL.fullmatch(base) or MODEL_OF_RANK.fullmatch(base)):
            raise
        try:
            value, archive = torch_save.load(files, extent, _ANY_CLASS)
        except Corrupt:  # the first error says more
            raise refused from None
        foreign_keys = with_unknown(value) if isinstance(value, dict) else _OF_DEEPSPEED
        if foreign_keys & _OF_DEEPSPEED:
            raise
        return {key: inner for key, inner in value.items() if key not in foreign_keys}, archive


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a part of a configuration, empty if it has none."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def configuration(file: StateFile) -> dict[str, Any]:
    """Return DeepSpeed's configuration; empty if the checkpoint has only its file's name."""
    return section(file.content, "ds_config")


def is_bf16(file: StateFile) -> bool:
    """Return whether DeepSpeed was configured to train in bf16."""
    config = configuration(file)
    return (section(config, "bf16") or section(config, "bfloat16")).get("enabled") is True


def trained_dtype(model: StateFile) -> str:
    """Return the model's dtype by DeepSpeed's configuration: BF16 or F16 if enabled, else F32."""
    if is_bf16(model):
        return "BF16"
    return "F16" if section(configuration(model), "fp16").get("enabled") is True else "F32"


def optimizer_state(file: StateFile) -> dict[str, Any]:
    """Return the ZeRO optimizer's own state dict; raise Corrupt if there is none."""
    state = file.content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise Corrupt(f"{file.name}: no optimizer_state_dict")
    return state


def zero_stage(state: Mapping[str, Any]) -> Any:
    """Return the stage that an optimizer's state records, unchecked; None if it records none."""
    stage = state.get("zero_stage")
    return stage.args[0] if isinstance(stage, PickledObject) and stage.args else stage


def buffer_names(file: StateFile) -> set[str]:
    """Return the names in ``buffer_names``; other values in the list are ignored.

    Raise Corrupt if it is no list.
    """
    return {name for name in file.get("buffer_names", list) if isinstance(name, str)}


def param_shapes(file: StateFile) -> list[dict[str, Shape]] | None:
    """Return the shapes of the trained parameters by group, in the order of their elements.

    Return None without ZeRO, and for a model with experts of an older DeepSpeed (0.16). Raise
    Corrupt if a parameter is in two groups.
    """
    if file.content.get("param_shapes") is None:
        return None
    groups = [shapes_by_name(group, file.name) for group in file.get("param_shapes", list)]
    if sum(map(len, groups)) != len({name for group in groups for name in group}):
        raise Corrupt(f"{file.name}: a parameter is in two parameter groups")
    return groups


def trained_shapes(file: StateFile) -> dict[str, Shape]:
    """Return the shapes of the trained parameters of all groups. Raises as `param_shapes`."""
    return {name: shape for group in param_shapes(file) or () for name, shape in group.items()}


def shapes_by_name(value: Any, name: str) -> dict[str, Shape]:
    """Return ``value`` if it is a dictionary of shapes; raise Corrupt if not."""
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
    """Return the number of experts of each layer; None if there are none.

    Raise Unsupported for AutoEP's experts, Corrupt for impossible numbers.
    """
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
    """How a save was made: its ZeRO stage (0 to 3) and numbers of ranks.

    ``world``: data-parallel ranks; ``mp``: model-parallel ranks, which are pipeline stages times
    tensor-parallel ranks. ``prefix``: of the optimizer files' names (``bf16_`` or nothing).
    """

    stage: int
    world: int
    prefix: str = ""
    mp: int = 1


class ZeroFiles:
    """The files of one save, in the directory ``root`` (DeepSpeed calls it a tag).

    Each pickle is read once. Raises Unsupported if there are files of an unknown kind.
    """

    def __init__(self, files: Files, root: str) -> None:
        self.files, self.root, self.sizes = files, root, files.sizes()
        self.title = root or "."
        self._loaded: dict[str, StateFile] = {}
        self._names = inside(self.sizes, root)
        for base, name in self._names.items():
            if _OTHERS.fullmatch(base) and not any(pattern.fullmatch(base) for pattern in _KNOWN):
                raise Unsupported(
                    f"{name}: a kind of DeepSpeed file that is not known",
                    hint="convert it with ds_to_universal first",
                )

    def by_rank(self, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
        """Return the files of a pattern, by (model-parallel rank, data-parallel rank).

        A name without data-parallel rank counts as rank 0's. Raise Corrupt for an impossible rank.
        """
        names: dict[tuple[int, int], str] = {}
        for base, name in self._names.items():
            if match := pattern.fullmatch(base):
                numbers = [int(n or 0) for n in match.groups()]
                if max(numbers) >= MOST_RANKS:
                    raise Corrupt(f"{name}: a rank of {max(numbers)}")
                names[numbers[-1], numbers[0] if numbers[1:] else 0] = name
        return names

    @cached_property
    def setup(self) -> ZeroSetup:
        """How the save was made, by the optimizer files or else a model file.

        Raises Incomplete if there is none, Corrupt or Unsupported for impossible values.
        """
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
        """Return how the save was made, by a model file alone.

        So it is without ZeRO and in universal checkpoints. Raise Corrupt for impossible values.
        """
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
        """Return how many model-parallel ranks a model file records; else how many the names show.

        Raise Incomplete without any file, Unsupported if names show more than the file records.
        """
        models = self.by_rank(MODEL) or self.by_rank(MODEL_OF_RANK)
        ranks = {mp for mp, _ in [*models, *self.by_rank(OPTIM)]}
        if not ranks:
            raise Incomplete(
                f"{join(self.root, 'mp_rank_00_model_states.pt')}: not found, nor another file that"
                " says how many ranks there are",
                hint="add the other nodes' directories; ds_to_universal copies model files last",
            )
        if not models:
            return max(ranks) + 1
        name = models[min(models)]
        count = mp_world_size(self.load(name))
        if max(ranks) >= count:
            raise Unsupported(
                f"{self.title}: files of {max(ranks) + 1} tensor or pipeline parallel ranks,"
                f" {name} says {count}",
                hint=(
                    "they are of different saves: give those of one alone; mp_rank_00 of several is"
                    " not the model"
                ),
            )
        return count

    def optimizer_files(self, mp: int) -> list[str]:
        """Return the path of the optimizer file of every data-parallel rank; none without ZeRO.

        The paths follow from the number of ranks: a file may be missing.
        """
        stem = join(self.root, f"{self.setup.prefix}zero_pp_rank_")
        return [
            f"{stem}{rank}_mp_rank_{mp:02d}_optim_states.pt"
            for rank in range(self.setup.world if self.setup.stage else 0)
        ]

    def model_files(self, mp: int) -> list[str]:
        """Return the name of the model file, at stage 3 of every data-parallel rank's.

        The files may be missing. Raise as `by_rank`.
        """
        if self.setup.stage < 3:
            return [join(self.root, f"mp_rank_{mp:02d}_model_states.pt")]
        names, stem = self.by_rank(MODEL_OF_RANK), join(self.root, "zero_pp_rank_")
        return [
            names.get((mp, rank), f"{stem}{rank}_mp_rank_{mp:02d}_model_states.pt")
            for rank in range(self.setup.world)
        ]

    def all_model_files(self) -> list[str]:
        """Return the names of the model files of all ranks, also of missing ones."""
        return [name for mp in range(self.setup.mp) for name in self.model_files(mp)]

    def all_optimizer_files(self) -> list[str]:
        """Return the names of the optimizer files of all ranks, also of missing ones."""
        return [name for mp in range(self.setup.mp) for name in self.optimizer_files(mp)]

    def layer_files(self) -> dict[str, int]:
        """Return the files of a pipeline's layers in order, with the layers' numbers.

        Raise Unsupported if layers are cut over tensor-parallel ranks.
        """
        numbers: dict[str, int] = {}
        for base, name in self._names.items():
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
        """Return the paths, present or not, of the layers whose numbers begin these names.

        Names of tied modules have no number.
        """
        numbers = {name.partition(".")[0] for name in parameters}
        return [
            join(self.root, f"layer_{int(n):02d}-model_states.pt")
            for n in sorted(numbers)
            if n.isascii() and n.isdecimal() and len(n) < 7
        ]

    def expert_files(self, counts: Sequence[int]) -> dict[str, int]:
        """Return the paths of all experts' files, present or not, with the experts' numbers.

        ``counts``: how many experts each layer has.
        """
        return {
            join(self.root, f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"): expert
            for layer, count in enumerate(counts)
            for expert in range(count)
        }

    def has_experts(self) -> bool:
        """Return whether there are files of experts, or of their optimizer states."""
        return any(_EXPERT.fullmatch(b) or _EXPERT_OPTIM.fullmatch(b) for b in self._names)

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
        """Return one file with its content, read at the first call alone.

        Raise Incomplete if it is missing, else as `load`.
        """
        if name not in self._loaded:
            self.require([name])
            self._loaded[name] = load(self.files, name)
        return self._loaded[name]


def mp_world_size(file: StateFile) -> int:
    """Return how many model-parallel ranks a model file records; 1 if it is old and records none.

    Raise Corrupt if the number is impossible.
    """
    mp = file.content.get("mp_world_size", 1)
    if type(mp) is not int or not 0 < mp < MOST_RANKS:
        raise Corrupt(f"{file.name}: mp_world_size is {brief(mp)}")
    return mp


# Whether the files are of one save

# what all model files of one save record
_OF_A_MODEL = (
    *("global_steps", "global_samples", "skipped_steps"),
    *("dp_world_size", "mp_world_size", "ds_version"),
)
# relative; learning rates are computed on every machine, and change far more from step to step
_TOLERANCE = 1e-9


def check_agreement(
    setup: ZeroSetup, models: Sequence[StateFile], ranks: Sequence[Sequence[StateFile]]
) -> None:
    """Raise Corrupt if two files record different values of one number, or one is of another kind.

    Raise Unsupported for files of another number of model-parallel ranks, or of AutoEP. ``ranks``:
    the optimizer files of each model-parallel rank; pipeline stages need not have the same
    parameter groups.
    """
    _check_equal(models, lambda file: [(key, file.content.get(key)) for key in _OF_A_MODEL])
    for each in ranks:
        _check_equal(each, _optimizer_numbers)
    optim = [file for each in ranks for file in each]
    _check_equal([*models, *optim], lambda file: [("ds_version", file.content.get("ds_version"))])
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


def _check_equal(
    files: Sequence[StateFile], values: Callable[[StateFile], Iterable[tuple[str, Any]]]
) -> None:
    """Raise Corrupt if two files have different ``values`` of one name."""
    first: dict[str, tuple[str, Any]] = {}
    for file in files:
        for key, value in values(file):
            name, expected = first.setdefault(key, (file.name, value))
            if not _is_equal(value, expected):
                raise Corrupt(
                    f"{file.name}: {key} is {brief(value)}, {brief(expected)} in {name}",
                    hint="the files are of different saves: give those that one save wrote",
                )


def _is_equal(first: Any, expected: Any) -> bool:
    """Return whether two values agree; floats may differ a little, and other objects agree."""
    if type(first) is float and type(expected) is float:
        return isclose(first, expected, rel_tol=_TOLERANCE)
    are_plain = all(type(value) in (bool, int, float, str) for value in (first, expected))
    return not are_plain or bool(first == expected)


def _optimizer_numbers(file: StateFile) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the numbers that all ranks share; the value is None if it is missing.

    They are stage, partition counts, loss scale, step counts, learning rates and weight decays.
    """
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
    for number, parameter_state in states.items() if isinstance(states, dict) else ():
        if isinstance(parameter_state, dict):
            yield f"step of parameter {brief(number)}", parameter_state.get("step")


def refuse_offloaded(files: ZeroFiles, model: StateFile) -> None:
    """Raise Unsupported if the fp32 weights are not in the files, or are cut in an unknown way."""
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
    """Return why the model's own weights may differ from the fp32 masters rounded.

    It is empty in plain ZeRO, where they are equal. ZenFlow updates masters later than weights;
    ``quantize_training`` and ``compression_training`` quantise the weights after each step
    (``deepspeed/runtime/zenflow``, ``engine.py`` of 0.9); ``zero_quantized_weights`` gathers them
    quantised.
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
