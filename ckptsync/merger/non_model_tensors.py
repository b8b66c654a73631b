"""Leave out what lies beside a model's weights: optimizer states, averages, the trainer's files.

Scripts save all of them in one state dict, or in files beside each other, and a merge must not
write them as weights.  An optimizer's tensor has the name of a weight and, as its last component, a
state's (``exp_avg``); an average has the model's own names behind a word such as ``ema``.  What is
left out is named in a note.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from ckptsync.errors import CkptsyncError
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import SAFETENSORS, TORCH, file_kind
from ckptsync.layouts.registry import LAYOUTS, WeightsSource
from ckptsync.merger.completeness import first_names
from ckptsync.tensors import Files, Shape, Tensor

# The states of torch's optimizers, and of bitsandbytes', Apex's, torchao's and Muon's.
_STATES = frozenset(
    """
    exp_avg exp_avg_sq exp_inf max_exp_avg_sq momentum_buffer square_avg acc_delta grad_avg sum
    exp_avg_sq_row exp_avg_sq_col state1 state2 qmap1 qmap2 absmax1 absmax2 momentum prev eta mu ax
    step master_param fp32_param
    """.split()  # noqa: SIM905
)
_CERTAIN = (".exp_avg", ".exp_avg_sq", ".momentum_buffer", ".square_avg", ".exp_inf")
_IS_CALLED_OPTIMIZER = re.compile(r"(.+_)?optim(izer)?s?(_states?)?(_[0-9]+)?")
_OPTIMIZER = re.compile(rf"{_IS_CALLED_OPTIMIZER.pattern}|state|param_groups")
_AVERAGE = re.compile(r"(.+_)?(ema|swa)(_.+)?|averaged(_.+)?|shadow(_.+)?")
_MODELS = ("model", "module")  # torch's ``AveragedModel`` keeps its copy in ``module``
MOST_FILES = 20  # that a note names
_MOST_OUTER = 4  # components before a weight's name: ``state.optimizer.0.state``
# What trainers keep of themselves: not weights, whatever is in it.
_TRAINERS = re.compile(
    r"(.*[_-])?(common|data|dataloader|sampler|state|states|scheduler|rng|scaler|meta|metadata|info"
    r"|args|optim|optimizer|callbacks?)([_-].*)?\.(pt|pth|bin|pkl)"
)


def drop_states(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Return the model's own tensors, and a note each on optimizer states and averages left out."""
    names = [t.name for t in tensors]
    firsts = {name.partition(".")[0].lower() for name in names}
    if not any(name.endswith(_CERTAIN) for name in names) and not any(
        _AVERAGE.fullmatch(first) or _OPTIMIZER.fullmatch(first) for first in firsts
    ):
        return tuple(tensors), ()  # most models
    shapes = {t.name: t.shape for t in tensors}
    states = set(_find_optimizer_states(shapes))
    averages = set(_find_averages({n: s for n, s in shapes.items() if n not in states}))
    modules = ", ".join(sorted({name.partition(".")[0] for name in averages}))
    kinds = (
        ("an optimizer", states, ""),
        ("an average of the weights", averages, f" (SOURCE@module={modules} writes it)"),
    )
    notes = tuple(
        f"{len(names)} tensors of {owner} are in the same files, and are left out{hint}:"
        f" {first_names(sorted(names))}"
        for owner, names, hint in kinds
        if names
    )
    return tuple(t for t in tensors if t.name not in states and t.name not in averages), notes


def _find_optimizer_states(shapes: dict[str, Shape]) -> Iterator[str]:
    """Yield an optimizer's tensors, some twice: states of weights, and all below its own module."""
    optimizers = set[str]()
    for name in shapes:
        weight, _, kind = name.rpartition(".")
        is_called = _IS_CALLED_OPTIMIZER.fullmatch(name.partition(".")[0])
        if kind not in _STATES and not is_called:
            continue
        outer_path, weight_name = _split_weight_name(weight, shapes)
        if weight_name and (kind in _STATES or outer_path):
            yield name
        first = outer_path.partition(".")[0] if weight_name else name.partition(".")[0]
        if first and _OPTIMIZER.fullmatch(first) and f".{kind}" in _CERTAIN:
            optimizers.add(first)
    optimizers |= {"param_groups"} if "state" in optimizers else set()
    yield from (name for name in shapes if name.partition(".")[0] in optimizers)


def _split_weight_name(name: str, shapes: Collection[str]) -> tuple[str, str]:
    """Return what stands before a weight's name, and the weight as ``shapes`` has it.

    Up to `_MOST_OUTER` components may stand before it, and ``shapes`` may have it below one of
    `_MODELS`. Both are empty if it is no weight's name.
    """
    parts = name.split(".")
    for depth in range(min(_MOST_OUTER, len(parts) - 1) + 1):
        inner = ".".join(parts[depth:])
        candidates = (inner, *(f"{model}.{inner}" for model in _MODELS))
        if stored := next((n for n in candidates if n in shapes), ""):
            return ".".join(parts[:depth]), stored
    return "", ""


def _find_averages(shapes: dict[str, Shape]) -> Iterator[str]:
    """Yield the names of an average's tensors: all that begin with one word such as ``ema``.

    They are an average's if at least half of them have the name, behind that word, and the shape of
    a tensor of the model.
    """
    sections: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        first, _, inner = name.partition(".")
        if inner and _AVERAGE.fullmatch(first.lower()):
            sections[first].append(inner)
    for first, names in sections.items():
        copies = [
            inner
            for inner in names
            if shapes[f"{first}.{inner}"] in map(shapes.get, _counterparts(inner))
        ]
        if copies and 2 * len(copies) >= len(names):
            yield from (f"{first}.{inner}" for inner in names)


def _counterparts(name: str) -> Iterator[str]:
    """Yield the names that the model may have for what its average calls ``name``."""
    for inner in dict.fromkeys((name, *(name.removeprefix(f"{model}.") for model in _MODELS))):
        yield from (inner, *(f"{model}.{inner}" for model in _MODELS))


def notes_on_files(files: Files, source: WeightsSource, reads: Iterable[str]) -> Iterator[str]:
    """Yield a note on tensor files beside ``source`` that nothing explains.

    Explained are files that were read (``reads``) or hold copies of the same save, an optimizer's
    and the trainer's by their names, and shards of the same layout.
    """
    explained = set(reads)
    for second in registry.beside(files, source):
        if second == registry.sources(files)[0]:  # compared with this one; else it is hollow
            with contextlib.suppress(CkptsyncError):  # it is damaged: its files are unexplained
                explained |= registry.layout(second.layout).demands(files, second.root).keys()
    shards = None if source.is_whole else LAYOUTS[source.layout].files
    folders = {"", source.root.rpartition("/")[0]} | ({source.root} if source.is_whole else set())
    unexplained = []
    for name in files.sizes():
        folder, _, base = name.rpartition("/")
        is_adapter = source.layout != "peft" and LAYOUTS["peft"].files.fullmatch(base)
        is_beside = folder in folders or is_adapter  # adapters have directories of their names
        if not is_beside or name in explained or not base.endswith((SAFETENSORS, *TORCH)):
            continue
        kind = file_kind(base)
        is_states = bool(kind and (kind.use or kind.is_shard)) or _TRAINERS.fullmatch(base)
        if (
            not is_states
            and not (shards and shards.fullmatch(base))
            and not _is_deepspeed_shard(base)
        ):
            unexplained.append(name)
    if unexplained:
        more = f" and {len(unexplained) - MOST_FILES} more" if len(unexplained) > MOST_FILES else ""
        names = ", ".join(sorted(unexplained)[:MOST_FILES])
        yield f"left out, since nothing says that they are of {source}: {names}{more}"


def _is_deepspeed_shard(base: str) -> bool:
    """Return whether a file's name is one of DeepSpeed's shards."""
    return LAYOUTS["zero"].files.fullmatch(base) is not None or base.startswith("layer_")
