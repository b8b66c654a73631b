"""Experts of a mixture: a file for each, and masters that are cut over fewer ranks than the rest.

Every rank numbers its own experts from 0; files and the merged model number them over all ranks.
Which experts a rank has follows from ``_create_expert_and_data_parallel``
(``deepspeed/utils/groups.py``) and ``use_data_before_expert_parallelism``; that it is so is seen in
what the ranks' partitions hold. Sources: ``_save_moe_checkpoint`` and ``load_moe_state_dict`` of
``deepspeed/runtime/engine.py``, 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckptsync.errors import Corrupt, Incomplete
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts import zero_partitions
from ckptsync.layouts.zero_files import (
    EXPERT,
    StateFile,
    ZeroFiles,
    configuration,
    optimizer_state,
)
from ckptsync.layouts.zero_partitions import Groups
from ckptsync.tensors import Copy, Shape

Held = Mapping[str, tuple[StateFile, StoredTensor]]

_LOCAL = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]+)(\..*)")


def expert_weights(
    files: ZeroFiles, counts: Sequence[int]
) -> dict[str, tuple[StateFile, StoredTensor]]:
    """Return every expert's own weights, under the names that the model file would give them.

    Experts are numbered over all ranks.

    Raises unless there are as many layers as ``counts`` says, each with all its experts, and all
    experts alike.
    """
    root = files.root or "."
    found: dict[str, tuple[StateFile, StoredTensor]] = {}
    layers: dict[str, dict[int, set[str]]] = {}
    for name in files.expert_files(counts):
        parts = EXPERT.fullmatch(name.rpartition("/")[2])
        expert = int(parts[2]) if parts else 0
        file = files.load(name)
        for key, value in file.content.items():
            match = _LOCAL.fullmatch(key) if isinstance(key, str) else None
            if match is None or not isinstance(value, StoredTensor) or int(match[2]) != expert:
                raise Corrupt(f"{file.name}: {brief(key)} is no weight of expert {expert}")
            layers.setdefault(match[1], {}).setdefault(expert, set()).add(match[3])
            found[key] = (file, value)
    if len(layers) != len(counts):
        raise Corrupt(
            f"{root}: experts of {len(layers)} layers, {len(counts)} expected",
            hint="they are of different saves",
        )
    for prefix, experts in layers.items():
        if any(weights != experts[min(experts)] for weights in experts.values()):
            raise Corrupt(f"{root}: not all experts of {prefix} have the same weights")
    if sorted(map(len, layers.values())) != sorted(counts):
        raise Incomplete(f"{root}: some layers lack experts, {brief(counts)} expected")
    return found


def are_experts(names: Iterable[str]) -> bool:
    """Return whether a parameter group is of experts; DeepSpeed never mixes them with others.

    Raises Corrupt if one does.
    """
    kinds = {_LOCAL.fullmatch(name) is not None for name in names}
    if len(kinds) > 1:
        raise Corrupt(
            "a parameter group has both experts and other parameters",
            hint="their masters are not cut alike",
        )
    return kinds == {True}


def all_experts(shapes: Mapping[str, Shape], own: Held) -> dict[str, Shape]:
    """Return the same parameters of all ranks' experts: ``shapes`` are those of one rank."""
    kinds = {(m[1], m[3]): shapes[m[0]] for m in map(_LOCAL.fullmatch, shapes) if m}
    return {
        m[0]: kinds[m[1], m[3]] for m in map(_LOCAL.fullmatch, own) if m and (m[1], m[3]) in kinds
    }


def _expert_sets(model: StateFile, optim: Sequence[StateFile], group: int) -> list[list[StateFile]]:
    """Return the ranks that share their experts.

    Every ``ep``-th one, or neighbours if DeepSpeed was configured so.
    """
    world = len(optim)
    counts = optimizer_state(optim[0]).get("partition_count")
    each = counts[group] if isinstance(counts, (list, tuple)) and group < len(counts) else None
    if type(each) is not int or not 0 < each <= world or world % each:
        raise Corrupt(
            f"{optim[0].name}: partition_count is {brief(counts)}, a divisor of {world} expected"
            f" for group {group}"
        )
    ep = world // each
    if configuration(model).get("use_data_before_expert_parallelism") is True:
        return [list(optim[e * each : (e + 1) * each]) for e in range(ep)]
    return [list(optim[e::ep]) for e in range(ep)]


def expert_masters(
    model: StateFile, optim: Sequence[StateFile], groups: Groups, own: Held
) -> dict[str, Copy]:
    """Return the masters of all parameter groups of experts, under their names over all ranks."""
    per_rank: dict[str, int] = {}  # layer → how many of its experts one rank has
    for match in filter(None, (_LOCAL.fullmatch(name) for shapes in groups for name in shapes)):
        per_rank[match[1]] = max(per_rank.get(match[1], 0), int(match[2]) + 1)
    found: dict[str, Copy] = {}
    trained: set[tuple[str, str]] = set()
    for index, shapes in enumerate(groups):
        for number, files in enumerate(
            _expert_sets(model, optim, index) if are_experts(shapes) else ()
        ):
            for name, copy in zero_partitions.group_masters(files, index, shapes).items():
                prefix, local, suffix = _LOCAL.fullmatch(name).groups()  # type: ignore[union-attr]
                found[f"{prefix}{number * per_rank[prefix] + int(local)}{suffix}"] = copy
                trained.add((prefix, suffix))
    # of each layer that is trained every expert has masters, and each is one that has a file
    odd = next((name for name in found if name not in own), None)
    if odd is not None:
        raise Corrupt(
            f"{model.name}: the optimizer has {odd}, of which there is no file",
            hint="the files are of different saves",
        )
    for one in filter(None, map(_LOCAL.fullmatch, own)):
        if (one[1], one[3]) in trained and one[0] not in found:
            raise Corrupt(f"{model.name}: {one[0]} has no master, other experts of its layer do")
    return found
