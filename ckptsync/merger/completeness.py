"""Judge whether tensors are a whole model or adapter, by names and shapes.  Pure.

A lost shard can take a layer with it, and a model without that layer still loads, with random
weights.  What ``config.json`` implies is needed, if `config_shapes` knows its class: then a missing
tensor is Incomplete.  For other classes nothing is certain: layers are compared with each other and
with the numbers of the configuration, and what does not fit is a doubt, in words.  The same holds
for ``adapter_config.json``: peft ignores a target that its base model does not have, so only half a
pair of factors is certainly too little.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ckptsync.errors import Incomplete
from ckptsync.layouts import config_shapes
from ckptsync.layouts.zero import WITHOUT_FROZEN
from ckptsync.merger.tensor_names import EMBEDDINGS, HEADS, is_tied
from ckptsync.tensors import Shape, Tensor

FIRST = 3  # names that a message lists
DOUBT = "may be incomplete: "
MOST_DOUBTS = 4
_COMMON = 2  # tensors that all layers have, besides others: parts of nn.Sequential have fewer
_OUTER = frozenset({"model", "language_model", "transformer", "gpt_neox"})
# Names come from files, so all that is done with them is bounded.
_NUMBER = re.compile(r"\.([0-9]{1,9})(?=\.)")
_MOST_NUMBERS = 8  # in a name
_MOST_KINDS = 16  # of layers in a stack that a layer is compared with
_LAYERS = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")  # of transformers; "num_layers" is also others'
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_ENDS = (".weight", ".bias")
_WEIGHTS = (".weight", ".lora_embedding_A", ".lora_embedding_B")
_PACKED = ("U8", "I8", "I32", "U32")
_EMPTY = (
    "ZeRO-3 leaves empty weights where it saves without gathering: merge DeepSpeed's shards"
    " (global_step…), or set stage3_gather_16bit_weights_on_model_save and save again"
)
_ALL = (
    "give the directories of all nodes; if the save is whole, and the model was changed on purpose,"
    " correct config.json"
)
_FACTORS = {"lora_A": "lora_B", "lora_B": "lora_A"} | {
    "lora_embedding_A": "lora_embedding_B",
    "lora_embedding_B": "lora_embedding_A",
}


def check_model(tensors: Sequence[Tensor], config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return doubts whether this is a whole model, at most `MOST_DOUBTS`.

    ``config``: what ``config.json`` says; None without one.  Raises Incomplete if a weight is
    empty, or if ``config`` implies tensors of which one is missing or too small.
    """
    _check_empty(tensors)
    config = config or {}
    shapes = {t.name: t.shape for t in tensors}
    expected = config_shapes.expected(config, shapes)
    if any(t.dtype in _PACKED and len(t.shape) > 1 for t in tensors):
        expected = config_shapes.Expected()  # quantised: shapes and names of their own
    is_whole = not any(WITHOUT_FROZEN in t.remark for t in tensors)
    if expected.sizes and (doubts := _compare(shapes, expected, config, is_whole)) is not None:
        if isinstance(config.get("vision_config"), dict):
            text = {_inner_name(name) for name in expected.sizes}
            vision = {
                name: shape for name, shape in shapes.items() if _inner_name(name) not in text
            }
            doubts += _compare_layers(vision, {})
        return _as_doubts(doubts)
    return _as_doubts(_compare_layers(shapes, config))


def check_adapter(tensors: Sequence[Tensor], config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return doubts whether this is a whole adapter, at most `MOST_DOUBTS`.

    ``config``: what ``adapter_config.json`` says; None without one.  Raises Incomplete if a weight
    is empty, or one of two LoRA factors is missing.
    """
    _check_empty(tensors)
    names = {t.name for t in tensors}
    halves = sorted(
        name for name in names if (counterpart := _counterpart(name)) and counterpart not in names
    )
    if halves:
        raise Incomplete(
            f"{first_names(halves)}: LoRA needs two factors, and the other one is missing",
            hint="give the directories of all nodes, or save the adapter again",
        )
    return _as_doubts(_compare_targets(names, config or {}))


def first_names(names: Sequence[str]) -> str:
    """Return the first few names as a text, and how many more there are."""
    more = f" and {len(names) - FIRST} more" if len(names) > FIRST else ""
    return ", ".join(names[:FIRST]) + more


def _as_doubts(doubts: Iterable[str]) -> tuple[str, ...]:
    """Return the first `MOST_DOUBTS` doubts as messages, which begin with `DOUBT`."""
    return tuple(f"{DOUBT}{doubt}" for doubt in list(doubts)[:MOST_DOUBTS])


def _check_empty(tensors: Sequence[Tensor]) -> None:
    """Raise Incomplete if a tensor of `_WEIGHTS` has the shape (0,), as ZeRO-3 leaves it."""
    # others may rightly be empty: observers of torch's quantisation begin as such
    if empty := [t.name for t in tensors if t.shape == (0,) and t.name.endswith(_WEIGHTS)]:
        raise Incomplete(
            f"{len(empty)} of {len(tensors)} tensors are empty, without values:"
            f" {first_names(empty)}",
            hint=_EMPTY,
        )


# A class that is known


def _compare(
    shapes: Mapping[str, Shape],
    expected: config_shapes.Expected,
    config: Mapping[str, Any],
    is_whole: bool,  # noqa: FBT001
) -> list[str] | None:
    """Return a message for each doubt, by the tensors and shapes that the configuration implies.

    None if no implied tensor is there. Raises Incomplete if a tensor, or a part of one, is missing.
    A missing tensor is only a doubt if the save says that it left some out (``is_whole`` is false).
    """
    sizes_by_name, compared_shapes = expected.sizes, shapes
    head, embedding = expected.head, expected.embedding
    if not sizes_by_name.keys() <= shapes.keys():
        # a part of the model, or one that keeps the text model in an attribute
        compared_shapes = {_inner_name(name): shape for name, shape in shapes.items()}
        sizes_by_name = {_inner_name(name): sizes for name, sizes in sizes_by_name.items()}
        head, embedding = _inner_name(head), _inner_name(embedding)
    absent = [name for name in sizes_by_name if name not in compared_shapes]
    if len(absent) == len(sizes_by_name):
        return None
    doubts = []
    if is_tied(config) and (head in compared_shapes or embedding in compared_shapes):
        absent = [name for name in absent if name not in (head, embedding)]
    elif absent and all(name.startswith(head.removesuffix("weight")) for name in absent):
        has_another = any(
            name not in sizes_by_name and name.endswith(_ENDS) and not _NUMBER.search(name)
            for name in compared_shapes
        )
        if has_another or embedding in shapes or not _is_untied(config):
            doubts.append(f"no {head}, which config.json implies: right with another head, or none")
            absent = []
    if absent:
        lost = set(absent)
        names = [name for name in expected.sizes if name in lost or _inner_name(name) in lost]
        count = len(sizes_by_name)
        message = (
            f"{len(absent)} of the {count} tensors that config.json implies are missing"
            f" ({count - len(absent)} are there): {first_names(names)}"
        )
        if is_whole:
            raise Incomplete(message, hint=_ALL)
        doubts.append(message)
    return [*doubts, *_compare_shapes(compared_shapes, sizes_by_name, {head, embedding})]


def _compare_shapes(
    shapes: Mapping[str, Shape],
    sizes_by_name: Mapping[str, Sequence[int | None]],
    vocabulary: Collection[str],
) -> list[str]:
    """Return a message for each kind of tensors that do not have the implied sizes.

    ``sizes_by_name``: None is any size. ``vocabulary``: names of tensors with a row for each token.
    Raises Incomplete if a tensor is smaller than it should be.
    """
    misshapen = []
    for name, sizes in sizes_by_name.items():
        shape = shapes.get(name)
        if shape is None or shape == sizes:
            continue
        pairs = list(zip(shape, sizes, strict=False))
        is_larger = [n > size for n, size in pairs if size is not None and n != size]
        if len(shape) != len(sizes) or (is_larger and any(is_larger)):
            misshapen.append(name)
        elif is_larger:
            raise Incomplete(
                f"{name}: {_format_sizes(shape)} is a part of {_format_sizes(sizes)},"
                " the shape that config.json implies",
                hint="give the directories of all nodes; or config.json is another model's",
            )
    doubts = []
    if resized := [name for name in misshapen if name in vocabulary]:
        first = resized[0]
        doubts.append(
            f"{first} has {shapes[first][0]} rows, config.json implies"
            f" {sizes_by_name[first][0]}: set vocab_size, if loading it fails"
        )
    if fixed := [name for name in misshapen if name not in vocabulary]:
        first = fixed[0]
        doubts.append(
            f"{len(fixed)} tensors have not the shapes that config.json implies, such as"
            f" {first}: {_format_sizes(shapes[first])}, not {_format_sizes(sizes_by_name[first])}"
        )
    return doubts


def _is_untied(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration says that head and embedding are two tensors."""
    sections = (config, *(config[key] for key in _SECTIONS if isinstance(config.get(key), dict)))
    return any(section.get("tie_word_embeddings") is False for section in sections)


def _inner_name(name: str) -> str:
    """Return a name without its leading components that are in `_OUTER`; the last one stays."""
    while True:
        outer, _, inner = name.partition(".")
        if outer not in _OUTER or not inner:
            return name
        name = inner


def _format_sizes(sizes: Sequence[int | None]) -> str:
    """Return sizes as a message shows them: ``4096 x ?``, where ? is any size."""
    return " x ".join("?" if n is None else str(n) for n in sizes) or "a scalar"


# Another class


def _compare_layers(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each doubt: of layers, experts, their counts, the head, empty weights."""
    stacks: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    of_experts: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    names: list[str] = []  # one for all experts of a layer: there may be 100,000
    for name in shapes:
        stack, mark, tail = name.partition("experts.")
        number, _, inner = tail.partition(".")
        if mark and number.isdecimal() and len(number) < 10:
            of_experts[f"{stack}experts", inner].add(int(number))
        else:
            names.append(name)
    names += (f"{stack}.#.{inner}" for stack, inner in of_experts)
    experts: defaultdict[str, dict[str, set[int]]] = defaultdict(dict)
    for (stack, inner), numbers in of_experts.items():
        experts[f"{_NUMBER.sub('.#', stack)}.{inner}"][stack] = numbers
    for name in names:
        for match in islice(_NUMBER.finditer(name), _MOST_NUMBERS):
            tail = _NUMBER.sub(".#", name[match.end() :])
            stacks[name[: match.start()]][int(match[1])].add(tail)
    layers = {
        stack: members
        for stack, members in stacks.items()
        if len(members) > 1
        and min(map(len, members.values())) > _COMMON
        and len(set.intersection(*members.values())) >= _COMMON
    }
    for stack, members in layers.items():
        yield from _find_gaps(stack, members)
        yield from _find_thinner(
            stack, members, {0, max(members)} if not _is_causal(config) else ()
        )
    yield from _compare_experts(experts)
    yield from _compare_counts(layers, experts, config)
    yield from _check_head(shapes, config)
    hollow = [name for name, shape in shapes.items() if 0 in shape and name.endswith(".weight")]
    if hollow:
        yield f"{len(hollow)} weights have no elements: {first_names(hollow)}"


def _find_gaps(stack: str, layers: Collection[int]) -> Iterator[str]:
    """Yield a message if layers are missing below the greatest number; else nothing."""
    total = max(layers) + 1
    absent = total - len(layers)
    numbers = ", ".join(map(str, islice((n for n in range(total) if n not in layers), FIRST)))
    more = f" and {absent - FIRST} more" if absent > FIRST else ""
    if absent:
        layers_are = f"layer {numbers} is" if absent == 1 else f"layers {numbers}{more} are"
        yield f"{stack}: {layers_are} missing, of {total}"


def _find_thinner(
    stack: str, members: Mapping[int, set[str]], apart: Collection[int] = ()
) -> Iterator[str]:
    """Yield a message for each layer that alone lacks tensors that several other layers have.

    ``apart``: numbers of layers that may differ.
    """
    kinds = Counter(frozenset(parts) for parts in members.values())
    usual = [kind for kind, times in kinds.most_common(_MOST_KINDS) if times > 1]
    for number, parts in sorted(members.items()):
        fuller_kind = next((kind for kind in usual if parts < kind), None)
        if fuller_kind and kinds[frozenset(parts)] == 1 and number not in apart:
            lacking = sorted(name.removeprefix(".") for name in fuller_kind - parts)
            yield f"{stack}.{number} has no {first_names(lacking)}, which other layers have"


def _compare_experts(experts: Mapping[str, Mapping[str, set[int]]]) -> Iterator[str]:
    """Yield a message for each layer that has fewer experts than another layer of its stack."""
    reported = set()
    for layers in experts.values():
        most = set[int]().union(*layers.values())
        for stack, numbers in sorted(layers.items()):
            if numbers != most and stack not in reported:
                reported.add(stack)
                yield (
                    f"{stack}: {len(numbers)} experts, {len(most)} in other layers (no"
                    f" {min(most - numbers)})"
                )


def _compare_counts(
    layers: Mapping[str, Mapping[int, object]],
    experts: Mapping[str, Mapping[str, set[int]]],
    config: Mapping[str, Any],
) -> Iterator[str]:
    """Yield a message if there are some layers or experts, and fewer than the configuration says.

    Its first such number counts: of its sections, or of its top without any; that of layers only
    beside a key of `_WIDTHS`.
    """
    sections = [config[key] for key in _SECTIONS if isinstance(config.get(key), dict)] or [config]
    layer_counts = [(key, s[key]) for s in sections for key in _LAYERS if type(s.get(key)) is int]
    most = max((max(members) + 1 for members in layers.values()), default=0)
    for key, count in layer_counts[:1]:
        if 0 < most < count and any(width in s for s in sections for width in _WIDTHS):
            yield f"{most} layers, config.json says {key} {count}"
    numbers = [
        max(expert_numbers) + 1
        for by_stack in experts.values()
        for expert_numbers in by_stack.values()
    ]
    for key, count in [(k, s[k]) for s in sections for k in _EXPERTS if type(s.get(k)) is int][:1]:
        if 0 < max(numbers, default=0) < count:
            yield f"{max(numbers)} experts in a layer, config.json says {key} {count}"


def _check_head(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if an untied causal model has embeddings, and no head by name or rows."""
    rows = config.get("vocab_size")
    if not _is_causal(config) or not _is_untied(config):
        return
    embeddings = {name for name in shapes if name.endswith(EMBEDDINGS)}
    heads = (n for n, shape in shapes.items() if n.endswith(HEADS) or shape[:1] == (rows,))
    if embeddings and not any(name not in embeddings for name in heads):
        yield "no output layer (lm_head), and config.json does not tie it to the embedding"


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether ``config.json`` names a class that ends in ``ForCausalLM``."""
    classes = config.get("architectures")
    return isinstance(classes, list) and any(str(name).endswith("ForCausalLM") for name in classes)


# An adapter


def _counterpart(name: str) -> str:
    """Return the name of the other of LoRA's two factors; empty if ``name`` is no factor."""
    parts = name.split(".") if not name.endswith(".bias") else []  # only one has a bias
    for index in range(len(parts) - 1, max(-1, len(parts) - 4), -1):
        if parts[index] in _FACTORS:
            return ".".join((*parts[:index], _FACTORS[parts[index]], *parts[index + 1 :]))
    return ""


def _compare_targets(names: Collection[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for targets or ``modules_to_save`` without tensors, and layers with fewer.

    Nothing without factors.  Targets and layers only if ``target_modules`` is a list without
    exceptions, layers only without ``layers_to_transform``.
    """
    modules = {
        name.partition(mark)[0]
        for name in names
        if (mark := next((f".{m}" for m in _FACTORS if f".{m}" in name), ""))
    }
    targets = config.get("target_modules")
    if not modules:
        return
    has_exceptions = bool(config.get("exclude_modules"))
    if isinstance(targets, list) and not has_exceptions:
        absent = sorted(
            str(t) for t in targets if not any(m == str(t) or m.endswith(f".{t}") for m in modules)
        )
        if absent:
            yield f"no tensors of the target modules {first_names(absent)}"
    saved_modules = config.get("modules_to_save")
    if (
        isinstance(saved_modules, list)
        and saved_modules
        and not any(f".{m}." in n for m in saved_modules for n in names)
    ):
        yield f"no tensors of modules_to_save ({first_names(sorted(map(str, saved_modules)))})"
    if config.get("layers_to_transform") is not None or not isinstance(targets, list):
        return
    if has_exceptions:
        return
    stacks: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module in modules:
        if match := _NUMBER.search(module):
            parts = stacks[module[: match.start()]][int(match[1])]
            parts.add(_NUMBER.sub(".#", module[match.end() :]))
    for stack, layers in stacks.items():
        yield from _find_gaps(stack, layers)
        yield from _find_thinner(stack, layers)
