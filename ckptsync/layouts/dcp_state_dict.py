"""Which tensors of a distributed checkpoint are the model's, and what the model itself calls them.

A state dict is saved with whatever its caller put around it, and ``planner_data`` keeps the path of
every tensor in it.  The first of a path of several is a section: ``{"model": …, "optimizer": …}``
by accelerate, Lightning's ``FSDPStrategy`` (``model``) and ``ModelParallelStrategy``
(``state_dict``), torch's own ``{"app": AppState}``.  torchtitan puts the model's tensors at the
top, beside the sections of everything else (``torchtitan/components/checkpointer/dcp.py`` 0.3:
``_flattened_model_states_sd``).  Megatron-Core has no sections at all, and names its optimizer's
tensors ``optimizer.…`` (``megatron/core/optimizer/{optimizer,distrib_optimizer}.py`` 0.12 to 0.16).

A section is never a prefix of a name: a model's own names may begin with "model." too.

Tensors at the top beside sections are one nested state dict, and all of it the model, if the
checkpoint has no optimizer and no section is a model of its own: by its name (``teacher``,
``model_b``), or since it has the very tensors of the top again (`_is_nested`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ckptsync.errors import Unsupported
from ckptsync.formats.pickles import brief
from ckptsync.layouts.dcp_metadata import ChunkedTensor

TOP = ""  # the section of tensors that are in none
_MODEL = frozenset({"model", "module", "state_dict", "model_state_dict"})
_OTHER = re.compile(
    r"optim(izer)?s?(_states?)?(_dict)?(_[0-9]+)?|(lr_)?schedulers?(_[0-9]+)?|lr_scheduler_states?|(train_|val_)?data_?loaders?|samplers?"
    r"|train(er|ing)?(_states?)?|rng(_states?)?|(grad_|loss_)?scalers?|callbacks|loops|metrics|progress|steps?|global_step|epoch"
)
_AVERAGE = re.compile(r"(.+_)?ema(_.+)?")
_OF_ITS_OWN = re.compile(  # names of a whole model, or of a copy of one
    r"(.+_)?(model|module|state_dict|teacher|student|generator|discriminator|critic)s?[0-9]*(_.+)?"
    r"|(.+_)?(swa|avg|average|averaged|shadow|backup|copy)[0-9]*"
    r"|actor|policy|reward|target|ref|reference|best|last|old|previous|initial"
)
_OPTIMIZER = re.compile(
    r"(.+_)?optim(izer)?s?(_.+)?|param_groups(\..*)?|(.*\.)?(exp_avg|exp_avg_sq|momentum_buffer)",
    re.DOTALL,
)
_OF_OPTIMIZER = re.compile(r"(state|param_groups)(\..*)?", re.DOTALL)
_MEGATRON_OPTIMIZER = re.compile(r"(chained_[0-9]+\.)?optimizer\..*", re.DOTALL)
_EXTRA = "_extra_state"

Path = tuple[str, ...]
Named = tuple[tuple[Path, ChunkedTensor], ...]


def weights(
    found: Iterable[ChunkedTensor], fields: Mapping[str, Any], section: str | None, where: str
) -> list[tuple[str, ChunkedTensor]]:
    """Return the model's tensors under its own names; none if there is nothing but other states.

    ``fields`` are the metadata's.  ``section`` chooses one, `TOP` those in none; raises
    Unsupported, with the list, where there are several that could be meant.  ``where`` names the
    checkpoint.
    """
    named: Named = tuple((one.path, one) for one in found)
    # a planner that does not flatten keeps no paths: Megatron-Core's
    if not fields.get("planner_data"):
        named = _without_megatrons_optimizer(named, fields, where)
    sections = _sections(named)
    if section is not None:
        if section not in sections:
            there = ", ".join(repr(s) for s in sorted(sections))
            raise Unsupported(
                f"{where}: no section {brief(section)} in the state dict",
                hint=f"there are: {there}",
            )
        return _joined(_inner(section, sections[section]))
    known = _known(sections, _groups_of_parameters(fields))
    if len(known) > 1 and _is_nested(sections, known, fields):
        return _joined(tuple((path, one) for section in known for path, one in sections[section]))
    if len(known) > 1:
        names = ", ".join(repr(s) if s != TOP else "the names at the top" for s in sorted(known))
        raise Unsupported(
            f"{where}: {len(known)} sets of weights in one checkpoint ({names}): choose one",
            hint=" or ".join(f"--source 'dcp:{where}#{s}'" for s in sorted(known)),
        )
    return _joined(_inner(known[0], sections[known[0]])) if known else []


def remark(
    found: Iterable[ChunkedTensor], chosen: Iterable[tuple[str, ChunkedTensor]], where: str
) -> str:
    """Return the remark on sections that are left out or merged, or nothing.

    It names an average that is left out, and sections that are merged with the names at the top.
    """
    chosen = tuple(chosen)
    taken = {id(one) for _, one in chosen}
    left = {
        one.path[0]
        for one in found
        if len(one.path) > 1 and _AVERAGE.fullmatch(one.path[0].lower()) and id(one) not in taken
    }
    remarks = [
        f"{brief(s)} beside the weights is left out: --source 'dcp:{where}#{s}' takes it"
        for s in sorted(left)
    ]
    sections = _sections(tuple((one.path, one) for _, one in chosen))
    if len(sections) > 1:
        names = ", ".join(brief(s) for s in sorted(sections) if s != TOP)
        remarks.append(
            f"{names} and the names at the top are one model: --source 'dcp:{where}#' takes the top"
            " alone"
        )
    return "; ".join(remarks)


def _sections(named: Named) -> dict[str, Named]:
    """Return the tensors of each section.

    A module's extra state may be a dict of its own, and stays with the module.
    """
    found: dict[str, list[tuple[Path, ChunkedTensor]]] = {}
    for path, one in named:
        is_top = len(path) == 1 or path[0].endswith(_EXTRA)
        found.setdefault(TOP if is_top else path[0], []).append((path, one))
    return {section: tuple(inner) for section, inner in found.items()}


def _known(sections: Mapping[str, Named], grouped: Collection[str]) -> list[str]:
    """Return the sections that could be the model; none if there are only other states."""
    known = [
        s
        for s, inner in sections.items()
        if not _OTHER.fullmatch(s) and not _is_optimizer(s, inner, grouped)
    ]
    if TOP in known and len(sections) > 1 and not any(one.shape for _, one in sections[TOP]):
        known.remove(TOP)  # numbers beside the sections: a step, a loss
    if len(known) > 1:
        known = [s for s in known if any(map(_is_weight, (one for _, one in sections[s])))] or known
    if len(known) > 1:
        known = [s for s in known if not _AVERAGE.fullmatch(s.lower())] or known
    return known


def _is_nested(
    sections: Mapping[str, Named], known: Collection[str], fields: Mapping[str, Any]
) -> bool:
    """Return whether the known sections are parts of one nested state dict.

    One shape under one name in both proves no copy; two or more, and nothing else in one of them,
    may be another set of the same weights.
    """
    if TOP not in known or any(map(_OPTIMIZER.fullmatch, _words(fields))):
        return False
    top = {(path, one.shape) for path, one in _joined(sections[TOP])}
    for section in known:
        if section == TOP:
            continue
        inner = {(name, one.shape) for name, one in _joined(_inner(section, sections[section]))}
        if (
            _OF_ITS_OWN.fullmatch(section.lower())
            or len(inner & top) == min(len(inner), len(top)) > 1
        ):
            return False
    return True


def _words(fields: Mapping[str, Any]) -> Iterable[str]:
    """Return all words of the paths in the state dict, also of what is no tensor."""
    return {
        str(word).lower()
        for path in fields["planner_data"].values()
        if isinstance(path, (tuple, list))
        for word in path
    }


def _is_weight(one: ChunkedTensor) -> bool:
    """Return whether this is a floating-point tensor with axes.

    Every model has some; counters and random states are none.
    """
    return bool(one.shape) and one.dtype.startswith(("F", "BF", "C"))


def _is_optimizer(section: str, inner: Named, grouped: Collection[str]) -> bool:
    """Return whether a section is an optimizer's, whatever its name is.

    It is ``{"state": …, "param_groups": …}`` of `torch.optim.Optimizer.state_dict`, also flattened.
    """
    return section in grouped and all(
        len(path) > 1 and _OF_OPTIMIZER.fullmatch(path[1]) for path, _ in inner
    )


def _groups_of_parameters(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the sections that have ``param_groups``, whose values are mostly no tensors."""
    paths = fields.get("planner_data")
    found = paths.values() if isinstance(paths, dict) else ()
    return frozenset(
        str(path[0])
        for path in found
        if isinstance(path, (tuple, list))
        and len(path) > 1
        and type(path[1]) is str
        and path[1].startswith("param_groups")
    )


def _inner(section: str, named: Named) -> Named:
    """Return paths below the section, and below the model that an ``AppState`` in it may be."""
    if section == TOP:
        return named
    inner: Named = tuple((path[1:], one) for path, one in named)
    below = _sections(inner)
    model = [s for s in _MODEL if s in below]
    if section not in _MODEL and len(model) == 1 and TOP not in below:
        return tuple((path[1:], one) for path, one in below[model[0]])
    return inner


def _joined(named: Named) -> list[tuple[str, ChunkedTensor]]:
    return [(".".join(path), one) for path, one in named]


def _without_megatrons_optimizer(named: Named, fields: Mapping[str, Any], where: str) -> Named:
    """Return the tensors without the optimizer's.

    Raises Unsupported where nothing says that this is Megatron-Core's, or where a weight has not
    got its own shape.
    """
    kept: Named = tuple(
        (path, one) for path, one in named if not _MEGATRON_OPTIMIZER.fullmatch(path[0])
    )
    is_megatrons = "all_local_plans" in fields or "mcore_data" in fields
    if len(kept) < len(named) and not is_megatrons:
        raise Unsupported(
            f"{where}: tensors named 'optimizer.…' beside others, without a path that would say"
            " whether they are the model's",
            hint=(
                "Megatron-Core's torch_dist is known by its plans in .metadata, which were not"
                " found"
            ),
        )
    reshaped = fields.get("mcore_data")
    for path, _ in kept:
        data = reshaped.get(path[0]) if isinstance(reshaped, dict) else None
        if isinstance(data, dict) and data.get("nd_reformulated_orig_global_shape") is not None:
            raise Unsupported(
                f"{where}: {brief(path[0])} is stored flattened (flattened_range), not in its own"
                " shape",
                hint="load it with Megatron-Core and save it again as torch_dist",
            )
    return kept
