"""Whether DeepSpeed's files are of one save, and hold its weights.

DeepSpeed names a rank's file by the rank alone, so one that another save left behind has the same
name and, mostly, the same size. Sources: ``_common_checkpoint_state`` and ``_save_zero_checkpoint``
of ``deepspeed/runtime/engine.py``, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isclose
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import PickledObject, brief
from ckptsync.layouts.file_names import join
from ckptsync.layouts.zero_files import (
    MASTERS,
    StateFile,
    ZeroFiles,
    ZeroSetup,
    configuration,
    mp_world_size,
    optimizer_state,
    section,
    zero_stage,
)

_OF_A_MODEL = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "ds_version",
)
_ALIKE = (
    1e-9  # learning rates are computed on every machine; from step to step they change by far more
)


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
    root, config = files.root, section(configuration(model), "zero_optimization")
    swap = join(root, "offloaded_tensors/")
    if (
        any(name.startswith(swap) for name in files.sizes)
        or section(config, "offload_optimizer").get("device") == "nvme"
    ):
        raise Unsupported(
            f"{root or '.'}: the optimizer's tensors were offloaded to NVMe, and its files do not"
            " hold them",
            hint=(
                "save again with the optimizer offloaded to the CPU, or with"
                " stage3_gather_16bit_weights_on_model_save"
            ),
        )
    size = config.get("mics_shard_size")
    if type(size) is int and size > 0:
        raise Unsupported(
            f"{root or '.'}: MiCS shards the parameters over groups of {size} ranks, which cannot"
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
