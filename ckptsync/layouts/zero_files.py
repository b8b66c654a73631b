"""DeepSpeed's ZeRO files: their names, what is in them, and whether they are of one save.

Sources: ``deepspeed/runtime/engine.py`` (names, model states), ``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py`` and
``deepspeed/runtime/bf16_optimizer.py`` (optimizer states), 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import AnyClass, Build, Made, Name, brief, made, with_unknown
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts.names import inside, join
from ckptsync.layouts.rank_names import MOST as MOST_RANKS
from ckptsync.model import Extent, Files, Part

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
MODEL_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
EXPERT = re.compile(r"(?:layer_([0-9]+)_)?expert_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
LAYER = re.compile(r"layer_([0-9]+)(?:-model_([0-9]+))?-model_states\.pt")
_OTHERS = re.compile(r"layer_[0-9]+.*model_states\.pt|expert_[0-9]+_.*|mp_rank_[0-9]+_[0-9]+_model_states\.pt")
EXPERT_OPTIM = re.compile(r"expp_rank_[0-9]+_mp_rank_[0-9]+_optim_states\.pt")
_KNOWN = (OPTIM, MODEL_OF_RANK, MODEL, EXPERT, LAYER, EXPERT_OPTIM)
MASTERS = "single_partition_of_fp32_groups"

_ALLOWED: Mapping[Name, Build] = {
    **torch_pickle.ALLOWED,
    Name("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): made,
    Name("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): made,
    Name("deepspeed.runtime.zero.config", "ZeroStageEnum"): made,
    Name("deepspeed.utils.tensor_fragment", "fragment_address"): made,
}
_ANY_CLASS = AnyClass({name: build for name, build in _ALLOWED.items() if name not in torch_pickle.REFUSED})
_OF_DEEPSPEED = frozenset(  # `_common_checkpoint_state` of ``deepspeed/runtime/engine.py``, and what its parallel kinds add
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("dp_world_size", "mp_world_size", "ds_config", "ds_version", "num_experts", "universal_checkpoint_info"),
        *("ds_autoep_layers", "autoep_layers", "checkpoint_parallel_dims"),
    )
)


@dataclass(frozen=True, slots=True)
class StateFile:
    """One loaded ``*_states.pt``."""

    name: str
    archive: torch_save.Container
    content: dict[str, Any]

    def part(self, files: Files, tensor: Any) -> Part:
        """Return where one of its tensors lies."""
        if not isinstance(tensor, Stored):
            raise Corrupt(f"{self.name}: something else where a tensor is due")
        return torch_save.part(files, self.archive, tensor)

    def get(self, key: str, kind: type[Any]) -> Any:
        """Return an entry that must be a ``kind``; an empty one if it is absent or None."""
        value = self.content.get(key)
        value = kind() if value is None else value
        if not isinstance(value, kind):
            raise Corrupt(f"{self.name}: {key} is a {type(value).__name__}, {kind.__name__} expected")
        return value


def buffers(file: StateFile) -> set[str]:
    """Return ``buffer_names``; what else the list may hold is never hashed."""
    return {name for name in file.get("buffer_names", list) if isinstance(name, str)}


class Once:
    """Files of which each pickle is read once, for as long as somebody works with them."""

    def __init__(self, files: Files) -> None:
        self._files, self._sizes = files, files.sizes()
        self.loaded: dict[str, StateFile] = {}

    def sizes(self) -> Mapping[str, int]:
        """As `Files` says: those that there were at the beginning."""
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """As `Files` says."""
        self._files.read_into(name, start, out)


def load(files: Files, name: str) -> StateFile:
    """Read the pickle of one file; raises Incomplete if it is not there."""
    if not isinstance(files, Once):
        return _load(files, name)
    if name not in files.loaded:
        files.loaded[name] = _load(files, name)
    return files.loaded[name]


def _load(files: Files, name: str) -> StateFile:
    if name not in files.sizes():
        raise Incomplete(
            f"{name}: not there", hint="each node writes its own ranks' files: add the directory of the node that ran this rank"
        )
    value, archive = _read(files, Extent(name, 0, files.sizes()[name]))
    if not isinstance(value, dict):
        raise Corrupt(f"{name}: a {type(value).__name__}, a dictionary expected")
    return StateFile(name, archive, value)


def _read(files: Files, where: Extent) -> tuple[Any, torch_save.Container]:
    """Return what is pickled. A script's ``client_state`` lies among DeepSpeed's own entries, with classes of its own: such entries are left out."""
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


def is_ours(base: str) -> bool:
    """Return whether a file of this name belongs to a ZeRO checkpoint."""
    return any(pattern.fullmatch(base) for pattern in (OPTIM, MODEL_OF_RANK, MODEL))


def of_rank(names: Iterable[str], root: str, pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
    """Return files by (model-parallel rank, data-parallel rank); a file that is of no data-parallel rank is under rank 0.

    Raises Unsupported for files that DeepSpeed names so and that nothing here reads.
    """
    found: dict[tuple[int, int], str] = {}
    for base, name in inside(names, root).items():
        if _OTHERS.fullmatch(base) and not any(known.fullmatch(base) for known in _KNOWN):
            raise Unsupported(f"{name}: a kind of DeepSpeed file that is not known", hint="convert it with ds_to_universal first")
        if match := pattern.fullmatch(base):
            numbers = [int(n or 0) for n in match.groups()]
            if max(numbers) >= MOST_RANKS:
                raise Corrupt(f"{name}: a rank of {max(numbers)}")
            found[numbers[-1], numbers[0] if numbers[1:] else 0] = name
    return found


@dataclass(frozen=True, slots=True)
class Setup:
    """``stage`` 0 to 3, the data-parallel ``world`` size, ``prefix`` of the optimizer files (``bf16_`` or nothing).

    ``mp``: model-parallel ranks, which are pipeline stages times tensor-parallel ranks.
    """

    stage: int
    world: int
    prefix: str = ""
    mp: int = 1

    def optim(self, root: str, mp: int = 0) -> list[str]:
        """Return the optimizer file of every data-parallel rank, in their order; without ZeRO there is none."""
        ranks = range(self.world if self.stage else 0)
        return [join(root, f"{self.prefix}zero_pp_rank_{r}_mp_rank_{mp:02d}_optim_states.pt") for r in ranks]

    def models(self, names: Iterable[str], root: str, mp: int = 0) -> list[str]:
        """Return the model file; at stage 3 that of every data-parallel rank."""
        if self.stage < 3:
            return [join(root, f"mp_rank_{mp:02d}_model_states.pt")]
        there = of_rank(names, root, MODEL_OF_RANK)
        return [there.get((mp, r), join(root, f"zero_pp_rank_{r}_mp_rank_{mp:02d}_model_states.pt")) for r in range(self.world)]


def setup(files: Files, root: str) -> Setup:
    """Return what the files here say of the whole; raises Incomplete if none does."""
    optim = of_rank(files.sizes(), root, OPTIM)
    if not optim:
        return _setup_without_optimizer(files, root)
    name = optim[min(optim)]
    state = optimizer_state(load(files, name))
    base = name.rpartition("/")[2]
    return Setup(_stage(state), _world(state, name), base[: base.index("zero_pp_rank")], _parallel(files, root))


def optimizer_state(file: StateFile) -> dict[str, Any]:
    """Return the ZeRO optimizer's own state dict."""
    state = file.content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise Corrupt(f"{file.name}: no optimizer_state_dict")
    return state


def parallel(file: StateFile) -> int:
    """Return how many model-parallel ranks a model file says that there are; one in files of older DeepSpeed, which do not say."""
    mp = file.content.get("mp_world_size", 1)
    if type(mp) is not int or not 0 < mp < MOST_RANKS:
        raise Corrupt(f"{file.name}: mp_world_size is {brief(mp)}")
    return mp


def _parallel(files: Files, root: str) -> int:
    """Return how many model-parallel ranks a model file gives; where none is here, how many the names show."""
    models = of_rank(files.sizes(), root, MODEL) or of_rank(files.sizes(), root, MODEL_OF_RANK)
    seen = {mp for mp, _ in [*models, *of_rank(files.sizes(), root, OPTIM)]}
    if not models:
        return max(seen) + 1
    name = models[min(models)]
    count = parallel(load(files, name))
    if max(seen) >= count:
        raise Unsupported(
            f"{root or '.'}: files of {max(seen) + 1} tensor or pipeline parallel ranks, {name} says {count}",
            hint="they are of different saves: give those of one alone; mp_rank_00 of several is not the model",
        )
    return count


def _stage(state: Mapping[str, Any]) -> int:
    """Return the stage. ``BF16_Optimizer`` writes none; it partitions as stage 1 does."""
    stage = state.get("zero_stage", 1)
    stage = stage.args[0] if isinstance(stage, Made) and stage.args else stage
    if stage not in (1, 2, 3):
        raise Unsupported(f"ZeRO stage {brief(stage)}: 1, 2 and 3 are known")
    return int(stage)


def _world(state: Mapping[str, Any], name: str) -> int:
    """Return the world size out of ``partition_count``: a number at stage 3, one for each parameter group at stages 1 and 2."""
    count = state.get("partition_count")
    counts = count if isinstance(count, (list, tuple)) else [count]
    if not counts or any(type(n) is not int or not 0 < n < MOST_RANKS for n in counts):
        raise Corrupt(f"{name}: partition_count is {brief(count)}")
    return int(max(counts))


def _setup_without_optimizer(files: Files, root: str) -> Setup:
    """Return what a model file says: DeepSpeed without ZeRO keeps everything in the model file; with ZeRO-3, a node always has optimizer files too."""
    models = of_rank(files.sizes(), root, MODEL)
    if not models:
        raise Incomplete(f"{root or '.'}: no file here says how many ranks there are")
    file = load(files, models[min(models)])
    world = file.content.get("dp_world_size")
    config = configuration(file)
    stage = section(config, "zero_optimization").get("stage", 0)
    if stage == 0 and MASTERS in section(file.content, "optimizer"):
        stage = 1  # BF16_Optimizer without ZeRO: each rank has its partition in a file of its own, too
    if type(world) is not int or not 0 < world < MOST_RANKS or stage not in (0, 1, 2):
        raise Corrupt(f"{file.name}: dp_world_size {brief(world)}, ZeRO stage {brief(stage)}")
    prefix = "bf16_" if (section(config, "bf16") or section(config, "bfloat16")).get("enabled") is True else ""
    return Setup(stage, world, prefix, _parallel(files, root))


def configuration(file: StateFile) -> dict[str, Any]:
    """Return DeepSpeed's configuration; empty if the checkpoint has only the name of its file."""
    return section(file.content, "ds_config")


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a part of a configuration, empty if it has none."""
    found = config.get(key)
    return found if isinstance(found, dict) else {}


# Whether the files are of one save

_OF_A_MODEL = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")
_ALIKE = 1e-9  # learning rates are computed on every machine; from step to step they change by far more


def check_agreement(what: Setup, models: Sequence[StateFile], ranks: Sequence[Sequence[StateFile]]) -> None:
    """Raise Corrupt if two files record different values of the same, Unsupported for what another kind of rank wrote.

    DeepSpeed names a rank's file by the rank alone, so one that another save left behind has the same name and, mostly, the same
    size. ``ranks``: the optimizer files of each model-parallel rank; pipeline stages need not have the same parameter groups.
    Sources: ``_common_checkpoint_state`` and ``_save_zero_checkpoint`` of ``deepspeed/runtime/engine.py``, 0.19.8.
    """
    _check_alike(models, lambda file: [(key, file.content.get(key)) for key in _OF_A_MODEL])
    for each in ranks:
        _check_alike(each, _of_an_optimizer)
    optim = [file for each in ranks for file in each]
    _check_alike([*models, *optim], lambda file: [("ds_version", file.content.get("ds_version"))])
    for file in models:
        if parallel(file) != what.mp:
            raise Unsupported(
                f"{file.name}: says that there are {parallel(file)} tensor or pipeline parallel ranks, {what.mp} expected by the files here",
                hint="give the files of one save, of every node; mp_rank_00 alone is not the model",
            )
        world = file.content.get("dp_world_size")
        if what.stage and type(world) is int and world != what.world:
            raise Corrupt(f"{file.name}: dp_world_size is {world}, the optimizer files are of {what.world} ranks")
    for file in optim:
        if optimizer_state(file).get("ds_zero_partition_groups"):
            raise Unsupported(
                f"{file.name}: experts as AutoEP keeps them cannot be joined yet", hint="convert it with ds_to_universal"
            )
        if (MASTERS in optimizer_state(file)) == (what.stage == 3):
            raise Corrupt(f"{file.name}: not an optimizer state of ZeRO stage {what.stage}", hint="it is of another save")


def _check_alike(files: Sequence[StateFile], values: Callable[[StateFile], Iterable[tuple[str, Any]]]) -> None:
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
    """Yield numbers that are one for all ranks: what the loss scaler has come to, step counts, learning rates."""
    state = optimizer_state(file)
    stage = state.get("zero_stage")
    yield "zero_stage", stage.args[0] if isinstance(stage, Made) and stage.args else stage
    counts = state.get("partition_count")
    for number, count in enumerate(counts if isinstance(counts, (list, tuple)) else [counts]):
        yield f"partition_count {number}", count
    scaler = state.get("loss_scaler")
    if isinstance(scaler, Made) and isinstance(scaler.state, dict):
        yield from (("loss_scaler " + key, scaler.state.get(key)) for key in ("cur_iter", "cur_scale", "last_overflow_iter"))
    yield "base_optimizer_state_step", state.get("base_optimizer_state_step")
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups, states = (base.get("param_groups"), base.get("state")) if isinstance(base, dict) else (None, None)
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        if isinstance(group, dict):
            yield from ((f"{key} of parameter group {number}", group.get(key)) for key in ("lr", "step", "weight_decay"))
    for number, one in states.items() if isinstance(states, dict) else ():
        if isinstance(one, dict):
            yield f"step of parameter {brief(number)}", one.get("step")


def refuse_what_is_elsewhere(names: Iterable[str], root: str, models: Sequence[StateFile]) -> None:
    """Raise Unsupported where the fp32 weights lie in swap files, or are sharded in a way that the files do not tell."""
    config = section(configuration(models[0]), "zero_optimization") if models else {}
    swapped = next((n for n in names if n.startswith(f"{root}/offloaded_tensors/".lstrip("/"))), "")
    if swapped or section(config, "offload_optimizer").get("device") == "nvme":
        raise Unsupported(
            f"{root or '.'}: the optimizer's tensors were offloaded to NVMe, and its files do not hold them",
            hint="save again with the optimizer offloaded to the CPU, or with stage3_gather_16bit_weights_on_model_save",
        )
    size = config.get("mics_shard_size")
    if type(size) is int and size > 0:
        raise Unsupported(
            f"{root or '.'}: MiCS shards the parameters over groups of {size} ranks, which cannot be joined yet",
            hint="save with stage3_gather_16bit_weights_on_model_save",
        )


def unlike(model: StateFile) -> str:
    """Return why the model's own weights need not be the fp32 masters rounded; empty if they are, as in plain ZeRO.

    ZenFlow updates masters later than weights; ``quantize_training`` and ``compression_training`` quantise the weights after each step
    (``deepspeed/runtime/zenflow``, ``engine.py`` of 0.9); ``zero_quantized_weights`` gathers them quantised.
    """
    config = configuration(model)
    zero = section(config, "zero_optimization")
    used = [key for key in ("quantize_training", "compression_training") if config.get(key)]
    used += [key for key in ("zenflow", "zero_quantized_weights") if zero.get(key)]
    return (
        f"trained with {used[0]}: the model's own weights may differ from the fp32 masters, and are not compared with them"
        if used
        else ""
    )
