"""Names as the model itself has them, without what torch's wrappers put into them, one to one.  Pure.

Sources: ``torch.compile`` (``_orig_mod``: torch/_dynamo/eval_frame.py), FSDP1 (``_fsdp_wrapped_module``: torch/distributed/fsdp/_common_utils.py),
activation checkpointing (``_checkpoint_wrapped_module``: torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py), torch 2.13;
Lightning (``_forward_module``); DistributedDataParallel and DeepSpeed's engine (``module``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptsync.errors import Unsupported
from ckptsync.model import Tensor

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
OUTERMOST = "module"  # a name that a model may well have for a part of itself


def unwrapped(tensors: Sequence[Tensor], known: Collection[str] = ()) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors under their model's own names, and a note if any was renamed.

    ``known``: names of the base model, where there is one.  Raises Unsupported where two would get one name.
    """
    names = clean_names([t.name for t in tensors], known)
    if all(stored == name for stored, name in names.items()):
        return tuple(tensors), ()
    return renamed(tensors, names), _notes(names)


def renamed(tensors: Iterable[Tensor], names: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Each under its new name; what it is tied to too.  Raises Unsupported where two would get one name."""
    tensors = tuple(tensors)
    counts = Counter(names[t.name] for t in tensors)
    twice = sorted(t.name for t in tensors if counts[names[t.name]] > 1 and names[t.name] != t.name)
    if twice:
        raise Unsupported(
            f"{twice[0]}: another tensor has the name that is left of it, {names[twice[0]]}",
            hint="the state that was saved holds one model twice: save only one of them",
        )
    return tuple(t if names[t.name] == t.name else _renamed(t, names) for t in tensors)


def clean_names(found: Sequence[str], known: Collection[str] = ()) -> dict[str, str]:
    """Name as stored → name without wrappers.

    ``module`` is taken away where every name begins with it and the base model's names do not; any other first component too, where all
    of the base model's names are found behind it: a training module that keeps the model in an attribute (Lightning's ``model.``).
    """
    names = {name: _without(name) for name in found}
    has_own = any(name.startswith(f"{OUTERMOST}.") for name in known)
    while names and not has_own and all(name.startswith(f"{OUTERMOST}.") for name in names.values()):
        names = _inner(names)
    return _proven(names, set(known))


def _proven(names: dict[str, str], known: set[str]) -> dict[str, str]:
    deeper = names
    while known and not known <= set(deeper.values()):
        if len({name.partition(".")[0] for name in deeper.values()}) != 1 or not all("." in name for name in deeper.values()):
            return names
        deeper = _inner(deeper)
    return deeper


def _inner(names: Mapping[str, str]) -> dict[str, str]:
    return {stored: name.partition(".")[2] for stored, name in names.items()}


def _without(name: str) -> str:
    """A name that would be empty, or end in another component, is no wrapped one."""
    if not any(wrapper in name for wrapper in WRAPPERS):  # most names, and there may be a million
        return name
    parts = name.split(".")
    return name if parts[-1] in WRAPPERS else ".".join(part for part in parts if part not in WRAPPERS)


def _renamed(tensor: Tensor, names: Mapping[str, str]) -> Tensor:
    return replace(tensor, name=names[tensor.name], tied=names.get(tensor.tied, tensor.tied) if tensor.tied else None)


def _notes(names: Mapping[str, str]) -> tuple[str, ...]:
    changed = [(stored, name) for stored, name in names.items() if stored != name]
    stored, name = changed[0]
    gone = {part for s, n in changed for part in _gone(s, n)}
    return (f"{' and '.join(sorted(gone))} taken out of {len(changed)} names, such as {stored}: now {name}",)


def _gone(stored: str, name: str) -> set[str]:
    lost = Counter(stored.split(".")) - Counter(name.split("."))
    return set(lost)
