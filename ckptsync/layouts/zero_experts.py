"""DeepSpeed's mixture of experts: a file for each expert, and masters that are cut over fewer ranks than the rest.

Every rank numbers its own experts from 0; files and the merged model number them over all ranks.  Which experts a rank has follows
from ``_create_expert_and_data_parallel`` (``deepspeed/utils/groups.py``) and ``use_data_before_expert_parallelism``; that it is
so is seen in what the ranks' partitions hold.  Sources: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of
``deepspeed/runtime/engine.py``, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import Stored
from ckptsync.layouts import zero_masters, zero_slices
from ckptsync.layouts.names import inside, join
from ckptsync.layouts.zero_files import EXPERT, EXPERT_OPTIM, StateFile, configuration, load, of_rank, optimizer_state
from ckptsync.model import Copy, Files, Shape

_LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]+)(\..*)")
MOST = 1 << 16  # experts of a layer

Held = Mapping[str, tuple[StateFile, Stored]]


def counts(model: StateFile) -> list[int] | int | None:
    """Experts of each layer; one number for all where an old DeepSpeed wrote it; ``None`` if there are no experts.

    Raises Unsupported for AutoEP, which keeps experts in other ways.
    """
    if model.content.get("ds_autoep_layers") or model.content.get("autoep_layers"):
        raise Unsupported(
            f"{model.name}: experts as AutoEP keeps them cannot be joined yet", hint="convert it with ds_to_universal"
        )
    told = model.content.get("num_experts")
    if told is None:
        return None
    numbers = told if isinstance(told, list) else [told]
    if any(type(n) is not int or not 0 < n < MOST for n in numbers) or len(numbers) >= MOST:
        raise Corrupt(f"{model.name}: num_experts is {brief(told)}")
    return told if isinstance(told, (list, int)) else None


def names(root: str, told: list[int] | int) -> list[str]:
    """The files of all experts.  Old ones have no layer in their names; how many layers there are, only their content says."""
    if isinstance(told, int):
        return [join(root, f"expert_{e}_mp_rank_00_model_states.pt") for e in range(told)]
    wanted = [(layer, e) for layer, count in enumerate(told) for e in range(count)]
    return [join(root, f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt") for layer, e in wanted]


def is_there(files: Files, root: str) -> bool:
    """Whether there are files of experts, or of their optimizer states."""
    return bool(of_rank(files.sizes(), root, EXPERT)) or any(map(EXPERT_OPTIM.fullmatch, inside(files.sizes(), root)))


def weights(files: Files, root: str, told: list[int] | int) -> dict[str, tuple[StateFile, Stored]]:
    """Every expert's own weights, named as the model file would name them with the experts numbered over all ranks."""
    found: dict[str, tuple[StateFile, Stored]] = {}
    layers: dict[str, dict[int, frozenset[str]]] = {}
    for name in names(root, told):
        match = EXPERT.fullmatch(name.rpartition("/")[2])
        expert = int(match[2]) if match else 0
        file = load(files, name)
        for key, value in file.content.items():
            prefix, suffix = _checked(file, key, value, expert)
            layer = layers.setdefault(prefix, {})
            layer[expert] = layer.get(expert, frozenset()) | {suffix}
            found[key] = (file, value)
    _check_layers(root, layers, told)
    return found


def _checked(file: StateFile, key: Any, value: Any, expert: int) -> tuple[str, str]:
    match = _LOCAL.fullmatch(key) if isinstance(key, str) else None
    if match is None or not isinstance(value, Stored) or int(match[2]) != expert:
        raise Corrupt(f"{file.name}: {brief(key)} is no weight of expert {expert}")
    return match[1], match[3]


def _check_layers(root: str, layers: Mapping[str, Mapping[int, frozenset[str]]], told: list[int] | int) -> None:
    """As many layers as are told, each with all its experts, and all experts alike."""
    numbers = [told] * len(layers) if isinstance(told, int) else told
    if len(layers) != len(numbers):
        raise Corrupt(
            f"{root or '.'}: experts of {len(layers)} layers, {len(numbers)} expected", hint="they are of different saves"
        )
    for prefix, experts in layers.items():
        if len(set(experts.values())) != 1:
            raise Corrupt(f"{root or '.'}: not all experts of {prefix} have the same weights")
    if sorted(len(experts) for experts in layers.values()) != sorted(numbers):
        raise Incomplete(f"{root or '.'}: some layers lack experts, {brief(told)} expected")


def is_of_experts(shapes: Iterable[str]) -> bool:
    """Whether a parameter group is of experts; DeepSpeed never mixes them with others.  Raises Corrupt if one does."""
    kinds = {_LOCAL.fullmatch(name) is not None for name in shapes}
    if len(kinds) > 1:
        raise Corrupt("a parameter group has both experts and other parameters", hint="their masters are not cut alike")
    return kinds == {True}


def everywhere(shapes: Mapping[str, Shape], own: Held) -> dict[str, Shape]:
    """The same parameters of all ranks' experts: ``shapes`` are those of one rank."""
    kinds = {(m[1], m[3]): shapes[m[0]] for m in map(_LOCAL.fullmatch, shapes) if m}
    return {m[0]: kinds[m[1], m[3]] for m in map(_LOCAL.fullmatch, own) if m and (m[1], m[3]) in kinds}


def first_set(model: StateFile, optim: Sequence[StateFile], group: int) -> list[StateFile]:
    """The ranks that share the first experts, where a group is of experts; else all."""
    names_ = zero_slices.slices(optim[0], group) or {}
    return [optim[r] for r in _sets(model, optim, group)[0]] if is_of_experts(names_) else list(optim)


def masters(
    files: Files, model: StateFile, optim: Sequence[StateFile], groups: Sequence[dict[str, Shape]], own: Held
) -> dict[str, Copy]:
    """The masters of all parameter groups of experts, of all ranks, under their names over all ranks."""
    locals_ = _locals({name: shape for shapes in groups for name, shape in shapes.items()})
    found: dict[str, Copy] = {}
    for index, shapes in enumerate(groups):
        for number, ranks in enumerate(_sets(model, optim, index) if is_of_experts(shapes) else ()):
            mine = [optim[r] for r in ranks]
            copies = zero_masters.group(files, mine, index, shapes)
            zero_slices.check(files, mine, index, copies)
            found |= {_renumbered(name, number, locals_): copy for name, copy in copies.items()}
    _check_names(model, found, own)
    return found


def _sets(model: StateFile, optim: Sequence[StateFile], group: int) -> tuple[tuple[int, ...], ...]:
    """Which ranks share their experts: every ``ep``-th one, or neighbours if DeepSpeed was told so."""
    world = len(optim)
    told = optimizer_state(optim[0]).get("partition_count")
    each = told[group] if isinstance(told, (list, tuple)) and group < len(told) else None
    if type(each) is not int or not 0 < each <= world or world % each:
        raise Corrupt(f"{optim[0].name}: partition_count is {brief(told)}, a divisor of {world} expected for group {group}")
    ep = world // each
    if configuration(model).get("use_data_before_expert_parallelism") is True:
        return tuple(tuple(range(e * each, (e + 1) * each)) for e in range(ep))
    return tuple(tuple(range(e, world, ep)) for e in range(ep))


def _locals(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Layer → how many of its experts one rank has."""
    found: dict[str, int] = {}
    for match in filter(None, map(_LOCAL.fullmatch, shapes)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _renumbered(name: str, ep_rank: int, locals_: Mapping[str, int]) -> str:
    match = _LOCAL.fullmatch(name)
    return f"{match[1]}{ep_rank * locals_[match[1]] + int(match[2])}{match[3]}" if match else name


def _check_names(model: StateFile, found: Mapping[str, Copy], own: Held) -> None:
    """The masters are of experts that have files, and of all of them: of each layer that is trained, every expert alike."""
    odd = next((name for name in found if name not in own), None)
    if odd is not None:
        raise Corrupt(f"{model.name}: the optimizer has {odd}, of which there is no file", hint="the files are of different saves")
    trained = {(m[1], m[3]) for m in map(_LOCAL.fullmatch, found) if m}
    for name, match in ((name, _LOCAL.fullmatch(name)) for name in own):
        if match and (match[1], match[3]) in trained and name not in found:
            raise Corrupt(f"{model.name}: {name} has no master, other experts of its layer do")
