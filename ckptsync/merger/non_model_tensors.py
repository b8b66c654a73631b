"""What lies beside a model's weights and is none of them: optimizer states, averages, other files.

A state dict may hold all of them under flat names.  A tensor is known as an optimizer's by its last
component (``exp_avg``) together with the name of a weight before it, and an average by the same
names as the model's behind ``ema``.  They are left out, and named.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

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
    """Return the tensors that are the model's own, and notes on others among them."""
    names = [t.name for t in tensors]
    firsts = {name.partition(".")[0].lower() for name in names}
    if not any(name.endswith(_CERTAIN) for name in names) and not any(
        _AVERAGE.fullmatch(first) or _OPTIMIZER.fullmatch(first) for first in firsts
    ):
        return tuple(tensors), ()  # most models
    shapes = {t.name: t.shape for t in tensors}
    states = set(_optimizer_states(shapes))
    averages = set(_averages({n: s for n, s in shapes.items() if n not in states}))
    own = ", ".join(sorted({name.partition(".")[0] for name in averages}))
    kinds = (
        ("an optimizer", states, ""),
        ("an average of the weights", averages, f" (SOURCE@module={own} writes it)"),
    )
    notes = tuple(
        f"{len(left)} tensors of {what} are in the same files, and are left out{how}:"
        f" {first_names(sorted(left))}"
        for what, left, how in kinds
        if left
    )
    return tuple(t for t in tensors if t.name not in states and t.name not in averages), notes


def _optimizer_states(shapes: dict[str, Shape]) -> Iterator[str]:
    """Yield an optimizer's tensors: states of weights, and all beside them under its name."""
    outer = set[str]()
    for name in shapes:
        weight, _, kind = name.rpartition(".")
        is_called = _IS_CALLED_OPTIMIZER.fullmatch(name.partition(".")[0])
        if kind not in _STATES and not is_called:
            continue
        before, found = _weight_of(weight, shapes)
        if found and (kind in _STATES or before):
            yield name
        first = before.partition(".")[0] if found else name.partition(".")[0]
        if first and _OPTIMIZER.fullmatch(first) and f".{kind}" in _CERTAIN:
            outer.add(first)
    outer |= {"param_groups"} if "state" in outer else set()
    yield from (name for name in shapes if name.partition(".")[0] in outer)


def _weight_of(name: str, shapes: Collection[str]) -> tuple[str, str]:
    """Return what stands before a weight's name, and the weight; empty if there is none."""
    parts = name.split(".")
    for at in range(min(_MOST_OUTER, len(parts) - 1) + 1):
        inner = ".".join(parts[at:])
        own = (inner, *(f"{model}.{inner}" for model in _MODELS))
        if found := next((n for n in own if n in shapes), ""):
            return ".".join(parts[:at]), found
    return "", ""


def _averages(shapes: dict[str, Shape]) -> Iterator[str]:
    """Yield the tensors of an average: the model's own names and shapes, behind one word."""
    sections: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        first, _, rest = name.partition(".")
        if rest and _AVERAGE.fullmatch(first.lower()):
            sections[first].append(rest)
    for first, names in sections.items():
        copies = [
            rest
            for rest in names
            if shapes[f"{first}.{rest}"] in map(shapes.get, _counterparts(rest))
        ]
        if copies and 2 * len(copies) >= len(names):
            yield from (f"{first}.{rest}" for rest in names)


def _counterparts(name: str) -> Iterator[str]:
    """Yield the names that the model may have for what its average calls ``name``."""
    for inner in dict.fromkeys((name, *(name.removeprefix(f"{model}.") for model in _MODELS))):
        yield from (inner, *(f"{model}.{inner}" for model in _MODELS))


def notes_on_files(files: Files, source: WeightsSource, taken: Iterable[str]) -> Iterator[str]:
    """Yield a note on tensor files beside a source of which nothing is ``taken``.

    Files whose names say that they are an optimizer's or the trainer's are not named, nor are
    shards of the same save.
    """
    own = set(taken)
    for other in registry.beside(files, source):
        if other == registry.sources(files)[0]:  # compared with this one; else it is hollow
            own |= registry.layout(other.layout).demands(files, other.root).keys()
    shards = None if source.is_whole else LAYOUTS[source.layout].files
    folders = {"", source.root.rpartition("/")[0]} | ({source.root} if source.is_whole else set())
    left = []
    for name in files.sizes():
        folder, _, base = name.rpartition("/")
        is_adapter = source.layout != "peft" and LAYOUTS["peft"].files.fullmatch(base)
        is_beside = folder in folders or is_adapter  # adapters have directories of their names
        if not is_beside or name in own or not base.endswith((SAFETENSORS, *TORCH)):
            continue
        kind = file_kind(base)
        is_states = bool(kind and (kind.use or kind.is_shard)) or _TRAINERS.fullmatch(base)
        if not is_states and not (shards and shards.fullmatch(base)) and not _is_zero(base):
            left.append(name)
    if left:
        more = f" and {len(left) - MOST_FILES} more" if len(left) > MOST_FILES else ""
        names = ", ".join(sorted(left)[:MOST_FILES])
        yield f"left out, since nothing says that they are of {source}: {names}{more}"


def _is_zero(base: str) -> bool:
    return LAYOUTS["zero"].files.fullmatch(base) is not None or base.startswith("layer_")
