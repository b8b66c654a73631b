"""Find what a training with ZeRO resumes from: each parameter's fp32 master and optimizer states.

A rank's optimizer states are flat tensors as long as that of its masters, or longer by padding, so
the place of a master's elements (`ckptsync.layouts.zero`) is also the place of its states'
elements. The result does not depend on the number of ranks. Source: ``state_dict`` and
``_rigid_state_dict`` of ``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py``, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts import zero
from ckptsync.layouts.zero_files import (
    MASTERS,
    StateFile,
    ZeroFiles,
    ZeroSetup,
    configuration,
    expert_counts,
    optimizer_state,
    param_shapes,
    section,
)
from ckptsync.tensors import Copy, Extent, Files, Part, Tensor, read

ADVICE = "convert it with DeepSpeed's own ds_to_universal"
_EXPERTS = (
    "DeepSpeed's own ds_to_universal converts AutoEP's experts and leaves out others: go on with as"
    " many ranks as before"
)
STEP, MASTER = "step", "fp32"
_FLAT = "fp32_flat_groups"  # the masters of stage 3
_BASE, BASE3 = "base_optimizer_state", "optimizer_state_dict"
_SLICES = "param_slice_mappings"
_VERSION = "universal_checkpoint_version"


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a parameter group has once: a plain one, or a tensor and its bytes."""

    value: int | float | StoredTensor
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter with its fp32 master, its optimizer states by name, and its step if any."""

    tensor: Tensor
    master: Copy
    states: Mapping[str, Copy]
    step: Number | None


@dataclass(frozen=True, slots=True)
class TrainingState:
    """All that one save of ZeRO holds for a training with any number of ranks.

    ``others``: tensors of the model that are not trained, and other names of tied ones; at stage 3
    none. ``common``: the values of the optimizer's states that all ranks share, without sharded
    tensors; the few tensors that are left in it lie in ``first``.
    """

    stage: int
    world: int
    models: tuple[StateFile, ...]
    parameters: tuple[TrainedParameter, ...]
    others: tuple[Tensor, ...]
    common: Mapping[str, Any]
    first: StateFile


@dataclass(frozen=True, slots=True)
class _Flat:
    """One rank's flat masters of a group, and its states: tensors as long, and numbers."""

    master: Part
    states: Mapping[str, Part]
    dtypes: Mapping[str, str]
    numbers: Mapping[str, Number]


def training_state(files: Files, root: str) -> TrainingState:
    """Read all ranks' pickles and tensors of step counts, and return the whole state.

    ``parameters`` are in the order of ``param_shapes``. Raise Unsupported unless it is plain data
    parallelism with ZeRO and an optimizer whose states the universal form can hold; Incomplete if a
    rank's file is missing, Corrupt if ranks disagree.
    """
    save = ZeroFiles(files, root)
    _check_kind(save)
    names = save.all_optimizer_files()
    save.require([*save.all_model_files(), *names])
    models = tuple(save.load(name) for name in save.all_model_files())
    optim = [save.load(name) for name in names]
    _check_model(save, models[0])
    tensors = {tensor.name: tensor for tensor in zero.tensors(files, root)}
    state_key = BASE3 if save.setup.stage == 3 else _BASE
    groups = [_groups(file, state_key, save.setup.stage) for file in optim]
    if len({len(each) for each in groups}) > 1:
        raise Corrupt(f"{save.title}: the ranks have different numbers of parameter groups")
    by_file = {file.name: each for file, each in zip(optim, groups, strict=True)}
    _check_numbers(by_file)
    parameters: list[TrainedParameter] = []
    for index, shapes in enumerate(param_shapes(models[0]) or ()):
        for name in shapes:
            tensor = tensors.pop(name)
            if absent := tensor.copies[0].absent:
                raise Incomplete(f"{absent}: not found, or it does not say where {name} lies")
            parameters.append(_parameter(tensor, by_file, index, save.setup.stage))
    untrained = tuple(tensors.values()) if save.setup.stage < 3 else ()
    return TrainingState(
        save.setup.stage,
        save.setup.world,
        models,
        tuple(parameters),
        untrained,
        _common(optim[0], state_key, save.setup),
        optim[0],
    )


def _check_kind(save: ZeroFiles) -> None:
    """Raise Unsupported for tensor or pipeline parallelism, experts, and a save without ZeRO."""
    setup = save.setup
    if setup.mp > 1 or save.layer_files():
        raise Unsupported(
            f"{save.title}: tensor or pipeline parallel ranks are not converted", hint=ADVICE
        )
    if save.has_experts():
        raise Unsupported(f"{save.title}: a model with experts is not converted", hint=_EXPERTS)
    if not setup.stage:
        raise Unsupported(
            f"{save.title}: saved without ZeRO, so that no rank has a shard of the optimizer",
            hint="load it as it is: it does not depend on the number of ranks",
        )


def _check_model(save: ZeroFiles, model: StateFile) -> None:
    """Raise Unsupported if the model file says that the universal form cannot hold the state.

    So it does with experts, with a truthy entry of ``universal_checkpoint_info`` beside the
    version, and at stages 1 and 2 on several ranks with ``round_robin_gradients``.
    """
    if expert_counts(model):
        raise Unsupported(f"{model.name}: a model with experts is not converted", hint=_EXPERTS)
    info = section(model.content, "universal_checkpoint_info")
    if set_keys := [key for key, value in info.items() if value and key != _VERSION]:
        raise Unsupported(
            f"{model.name}: {brief(set_keys[0])} of universal_checkpoint_info says how parameters"
            " are cut, and is not converted",
            hint=ADVICE,
        )
    config = section(configuration(model), "zero_optimization")
    is_dealt = config.get("round_robin_gradients") is True and save.setup.stage < 3
    if is_dealt and save.setup.world > 1:
        raise Unsupported(
            f"{save.title}: trained with round_robin_gradients, which DeepSpeed's universal form"
            " mixes up",
            hint="save once without round_robin_gradients, on the same number of ranks",
        )


def _groups(file: StateFile, key: str, stage: int) -> list[_Flat]:
    """Return what one rank has of each parameter group; at stage 3, of each sub-group.

    Empty if the file has no list of masters; a group without an entry in the state of ``key`` has
    no states. Raise Unsupported if ``key`` holds no state dict of a torch optimizer, Corrupt if a
    group's masters are no tensor or its states no dictionary; else as `_flat`.
    """
    state = optimizer_state(file)
    base = state.get(key)
    if not isinstance(base, dict) or not isinstance(base.get("state"), dict):
        raise Unsupported(
            f"{file.name}: {key} is no state dict of a torch optimizer",
            hint="elastic_checkpoint is not converted: save without it",
        )
    masters = state.get(_FLAT if stage == 3 else MASTERS)
    flats = []
    for number, flat in enumerate(masters if isinstance(masters, (list, tuple)) else ()):
        index = number if stage == 3 else _index(base, number)
        states = base["state"].get(index, {})
        if not isinstance(flat, StoredTensor) or not isinstance(states, dict):
            raise Corrupt(f"{file.name}: no state of parameter group {number}")
        flats.append(_flat(file, flat, states))
    return flats


def _index(base: Mapping[str, Any], group: int) -> Any:
    """Return the key of a group's flat parameter in torch's state; ``group`` if none is."""
    groups = base.get("param_groups")
    group_content = groups[group] if isinstance(groups, list) and group < len(groups) else None
    indices = group_content.get("params") if isinstance(group_content, dict) else None
    is_single = isinstance(indices, list) and len(indices) == 1 and type(indices[0]) is int
    return indices[0] if is_single and indices else group


def _flat(file: StateFile, master: StoredTensor, states_of_torch: Mapping[Any, Any]) -> _Flat:
    """Return a rank's flat masters of a group with their states; read tensors of one number.

    ``states_of_torch``: the optimizer's states of them, by name; those that are None are left out.
    Raise Unsupported unless ``step`` is one number and every other state has at least one value for
    each element, Corrupt for a key that is no identifier, or ``fp32``.
    """
    states: dict[str, Part] = {}
    dtypes: dict[str, str] = {}
    numbers: dict[str, Number] = {}
    for key, value in states_of_torch.items():
        if not isinstance(key, str) or not key.isidentifier() or key == MASTER:
            raise Corrupt(f"{file.name}: {brief(key)} is no name of an optimizer's state")
        if isinstance(value, StoredTensor) and not value.shape:
            numbers[key] = Number(value, read(file.files, file.part(value).extent))
        elif type(value) in (int, float):
            numbers[key] = Number(value)
        elif isinstance(value, StoredTensor) and value.numel >= master.numel and key != STEP:
            states[key], dtypes[key] = file.part(value), value.dtype
        elif value is not None:
            raise Unsupported(
                f"{file.name}: the optimizer's state {key} does not have one value for each"
                " element, and the universal form has no place for it",
                hint="go on with as many ranks as before, or begin with a new optimizer",
            )
    if unexpected := sorted(numbers.keys() - {STEP}):
        raise Unsupported(
            f"{file.name}: the optimizer's state {unexpected[0]} is one number, and the universal"
            " form has no place for it",
            hint="go on with as many ranks as before, or begin with a new optimizer",
        )
    return _Flat(file.part(master), states, dtypes, numbers)


def _check_numbers(ranks: Mapping[str, Sequence[_Flat]]) -> None:
    """Raise Corrupt if two ranks record different step counts of one parameter group.

    ``ranks``: by file, what the rank has of each group; one without a step is passed over.
    """
    steps_by_group: dict[int, tuple[str, Any]] = {}
    for file, groups in ranks.items():
        for index, group in enumerate(groups):
            if STEP not in group.numbers:
                continue
            number = group.numbers[STEP]
            value = number.data or number.value
            name, expected = steps_by_group.setdefault(index, (file, value))
            if value != expected:
                raise Corrupt(
                    f"{file}: another step of parameter group {index} than {name}",
                    hint="the files are of different saves: give those that one save wrote",
                )


def _parameter(
    tensor: Tensor, ranks: Mapping[str, Sequence[_Flat]], index: int, stage: int
) -> TrainedParameter:
    """Return a parameter with its states, which lie where the elements of its first copy do.

    ``ranks``: by file, what the rank has of each group. ``index``: the parameter's group, not used
    at stage 3. ``step`` is that of the first rank that has one. Raise as `_moved`.
    """
    master = tensor.copies[0]
    groups = {file: each if stage == 3 else each[index : index + 1] for file, each in ranks.items()}
    flats = [group for each in groups.values() for group in each]
    keys = dict.fromkeys(key for group in flats for key in group.states)
    step = next((g.numbers[STEP] for g in flats if STEP in g.numbers), None)
    states = {key: _moved(tensor.name, master, key, groups) for key in keys}
    return TrainedParameter(tensor, master, states, step)


def _moved(name: str, master: Copy, key: str, groups: Mapping[str, Sequence[_Flat]]) -> Copy:
    """Return the copy of state ``key`` whose elements lie where those of ``master`` do.

    ``name`` is the parameter's, for messages; ``groups``: by file. Raise Corrupt if a rank lacks
    the state, or has it strided, too short, or in another dtype than others.
    """
    width, parts, dtypes = ITEMSIZE[master.dtype], list[Part](), set[str]()
    for part in master.parts:
        rank_groups = groups[part.extent.file]
        flat = _holder(rank_groups, part.extent.start)
        state = flat.states.get(key)
        if state is None:
            raise Corrupt(f"{part.extent.file}: no {key} of {name}, which other ranks have")
        dtypes.add(flat.dtypes[key])
        size = ITEMSIZE[flat.dtypes[key]]
        offset = (part.extent.start - flat.master.extent.start) // width
        if state.strides or (offset + part.sizes[0]) * size > state.extent.size:
            raise Corrupt(f"{part.extent.file}: {key} is too short to hold that of {name}")
        extent = Extent(part.extent.file, state.extent.start + offset * size, part.sizes[0] * size)
        parts.append(Part(part.offsets, part.sizes, extent, None, state.checksum))
    if len(dtypes) > 1:
        raise Corrupt(f"{name}: the ranks have its {key} in different element types")
    return Copy(dtypes.pop() if dtypes else master.dtype, master.grid, tuple(parts))


def _holder(flats: Sequence[_Flat], start: int) -> _Flat:
    """Return the last of ``flats`` whose masters begin at byte ``start`` or before."""
    candidates = [flat for flat in flats if flat.master.extent.start <= start]
    return max(candidates, key=lambda flat: (flat.master.extent.start, flat.master.extent.size))


def _common(file: StateFile, base: str, setup: ZeroSetup) -> dict[str, Any]:
    """Return the content of ``optimizer_state.pt``: rank 0's state without the sharded tensors.

    At stage 3 it has the steps and ``param_groups`` of the optimizer; at stages 1 and 2 paddings
    of 0, and ``setup.world`` as each partition count. Raise Corrupt without ``param_groups``.
    """
    state = optimizer_state(file)
    groups = state[base].get("param_groups")
    if not isinstance(groups, list):
        raise Corrupt(f"{file.name}: no param_groups")
    left_out: Iterable[str] = (MASTERS, _SLICES, _FLAT, base)
    content = {key: value for key, value in state.items() if key not in left_out}
    if setup.stage == 3:
        # DeepSpeed reads the step and the groups of stage 3 from here
        numbers = {
            index: {k: v for k, v in states.items() if k == STEP}
            for index, states in state[base]["state"].items()
            if isinstance(states, dict)
        }
        content[BASE3] = {**state[base], "state": numbers}
    else:
        paddings, counts = state.get("group_paddings"), state.get("partition_count")
        if isinstance(paddings, list):
            content["group_paddings"] = [0] * len(paddings)
        if isinstance(counts, list):
            content["partition_count"] = [setup.world] * len(counts)
    return {**content, "param_groups": groups}
