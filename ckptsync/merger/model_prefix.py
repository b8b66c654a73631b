"""Find where in a training's module the model begins, and what lies beside it.  Pure.

A training may keep the model in an attribute of a module of its own (Lightning's ``self.policy``),
or wrap it (TRL's ``pretrained_model``, which has ``v_head`` beside it).  Then the names of its
tensors begin with a path that transformers and peft do not know.  The path is found from names that
the model must have (the base model's, or those that the configuration implies), else from its
output layer or embeddings.  Where several models could be meant, the user must name one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptsync.errors import Unsupported
from ckptsync.layouts import config_shapes
from ckptsync.merger import adapter
from ckptsync.merger.tensor_names import HEADS, rename_tensors
from ckptsync.tensors import Tensor

TOP = "."  # how `--source SOURCE@module=.` spells the training's module itself
_PARTS = re.compile(r"(.*?)@module=([^@]+)(.*)", re.DOTALL)
_HEAD = "v_head.summary."  # of TRL's `ValueHead`
_VALUE_HEAD = re.compile(rf"((?:.+\.)?)({re.escape(_HEAD)}.+)", re.DOTALL)
_NOT_TEXT = re.compile(r"vis(ion|ual)|image|audio|speech|video")
_TRL = "pretrained_model"  # of TRL's `PreTrainedModelWrapper`
_DEEPEST = 8  # components of a path that is searched for
# Names of the inner model in classes with a head (`base_model_prefix`, transformers 5.24): what
# stands before them is the path, and a head stands beside them.
_INNERMOST = frozenset(
    """
    model transformer language_model text_model vision_model gpt_neox rwkv bert roberta deberta
    electra distilbert albert mpnet longformer esm ernie rembert roformer convbert layoutlm
    layoutlmv3 vit deit beit swin wav2vec2 hubert wavlm
    """.split()  # noqa: SIM905
)
# names of a text model in models of several, which stand before or behind the names above
_OF_SEVERAL = frozenset("language_model text_model vision_model thinker talker".split())  # noqa: SIM905
# parts that classes without a head have, and their embeddings in them
_PARTS_OF = _INNERMOST - {"model"} | {"backbone"}
_CLASSIFIERS = (
    *("score.weight", "classifier.weight", "classifier.dense.weight"),
    *("classifier.out_proj.weight", "classification_head.out_proj.weight"),
    *("qa_outputs.weight", "logits_proj.weight"),
)
_ALL_HEADS = (*HEADS, *_CLASSIFIERS)
_HEADS_OF = {
    "ForCausalLM": HEADS,
    "LMHeadModel": HEADS,
    "ForConditionalGeneration": HEADS,
    "ForMaskedLM": HEADS,
    "ForPreTraining": HEADS,
    "MTModel": HEADS,
    "CAUSAL_LM": HEADS,
    "SEQ_2_SEQ_LM": HEADS,
    "ForSequenceClassification": _CLASSIFIERS,
    "ForTokenClassification": _CLASSIFIERS,
    "ForQuestionAnswering": _CLASSIFIERS,
    "ForImageClassification": _CLASSIFIERS,
    "ForMultipleChoice": _CLASSIFIERS,
    "SEQ_CLS": _CLASSIFIERS,
    "TOKEN_CLS": _CLASSIFIERS,
}
"""The heads of a class, by how its name ends, or of peft's ``task_type``."""
# What a class without a head has at its top, where it has one of these.
_TOPS = (
    *("embeddings.word_embeddings.weight", "embeddings.position_embeddings"),
    *("embeddings.position_embedding.weight", "embeddings.cls_token"),
    *("embeddings.patch_embeddings.projection.weight", "shared.weight", "logit_scale"),
)

IN_DOUBT = (
    "nothing says where in the training's module the model begins, so all names are written as they"
    " are: if from_pretrained does not find them, give the model that was trained with --base, or"
    " --source SOURCE@module=PATH"
)


@dataclass(frozen=True, slots=True)
class InnerModel:
    """The model's tensors under its own names, TRL's value head, and notes on the rest.

    ``path``: what stood before the names; None if nothing says where they begin.
    """

    path: str | None
    tensors: tuple[Tensor, ...]
    value_head: tuple[Tensor, ...]
    notes: tuple[str, ...]


def split_source(source: str | None) -> tuple[str | None, str | None]:
    """Split ``lightning:x@module=actor@base`` into ``lightning:x@base`` and ``actor``.

    The second is the path of the model in the training's module; None if it is to be found.
    """
    if match := _PARTS.fullmatch(source or ""):
        return match[1] + match[3] or None, match[2]
    return source, None


def is_value_head(names: Collection[str]) -> bool:
    """Return whether these are the names of TRL's value head alone."""
    return bool(names) and all(map(_value_head, names))


def _value_head(name: str) -> re.Match[str] | None:
    """Return the path of TRL's wrapper, with a dot, and the rest of a value head's name, as groups.

    None if the name is not a value head's.
    """
    # there may be a million names, and of these two are a value head's
    return _VALUE_HEAD.fullmatch(name) if _HEAD in name else None


def find_inner_model(
    tensors: Sequence[Tensor],
    path: str | None,
    base: Collection[str] = (),
    config: Mapping[str, Any] | None = None,
    adapter_config: Mapping[str, Any] | None = None,
) -> InnerModel:
    """Return the model inside of the training's module.

    Args:
        tensors: Of the training's module.
        path: Of the model; None if it is to be found.
        base: Names of the base model, where it is known.
        config: What ``config.json`` says.
        adapter_config: What ``adapter_config.json`` says; the tensors are an adapter's.

    Raises:
        Unsupported: Several models could be meant, no name begins with ``path``, or transformers,
            or peft, would not load the names into the class that ``config`` names.

    """
    model_path = find_path([t.name for t in tensors], path, base, config, adapter_config)
    root = model_path or ""
    inner_names: dict[str, str] = {}
    head_names: dict[str, str] = {}
    outer_names: list[str] = []
    prefix = f"{root}." if root else ""
    for tensor in tensors:
        match = _value_head(tensor.name)
        if match and prefix.startswith(match[1]):
            head_names[tensor.name] = match[2]
        elif tensor.name.startswith(prefix):
            inner_names[tensor.name] = tensor.name.removeprefix(prefix)
        else:
            outer_names.append(tensor.name)
    notes = []
    if root and inner_names:
        stored, name = next(iter(inner_names.items()))
        notes.append(f"{root} taken out of {len(inner_names)} names, such as {stored}: now {name}")
    if outer_names:
        notes.append(_note_on_outside(outer_names, root))
    return InnerModel(
        model_path,
        _select_renamed(tensors, inner_names),
        _select_renamed(tensors, head_names),
        tuple(notes),
    )


def find_path(
    names: Sequence[str],
    path: str | None,
    base: Collection[str] = (),
    config: Mapping[str, Any] | None = None,
    adapter_config: Mapping[str, Any] | None = None,
) -> str | None:
    """Return what stands before the model's own names: ``path`` if it is given, "" for `TOP`.

    None if nothing says where they begin: then they are the model's own.  Raises Unsupported if no
    name begins with ``path``, and as `find_inner_model`, whose arguments these are.
    """
    if path is None:
        return _find_unnamed_path(names, base, config or {}, adapter_config)
    root = "" if path == TOP else path
    if root and not any(name.startswith(f"{root}.") for name in names):
        modules = ", ".join(sorted({name.partition(".")[0] for name in names})[:8])
        raise Unsupported(f"@module={path}: no tensor's name begins so", hint=f"some: {modules}")
    return root


def _select_renamed(tensors: Sequence[Tensor], names: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return the tensors in ``names``, renamed, without other ties; raise as `rename_tensors`."""
    if len(names) == len(tensors) and all(old == new for old, new in names.items()):
        return tuple(tensors)
    selected = (t for t in tensors if t.name in names)
    return rename_tensors(
        [t if t.tied in names else replace(t, tied=None) for t in selected], names
    )


def _note_on_outside(outside: Sequence[str], root: str) -> str:
    """Return a note on tensors beside the model, by the part of the module that has them."""
    counts = Counter(_outside_module(name, root) for name in outside)
    parts = [f"{part} ({count} tensors)" for part, count in counts.items()]
    return (
        f"{len(outside)} tensors are outside of the model at {root} and are left out:"
        f" {', '.join(parts)}; --source SOURCE@module={next(iter(counts))} writes those of one part"
    )


def _outside_module(name: str, root: str) -> str:
    """Return the outermost module that holds a tensor and not the model."""
    parts = name.split(".")
    common = 0
    for component, root_component in zip(parts, root.split("."), strict=False):
        if component != root_component:
            break
        common += 1
    return ".".join(parts[: max(1, min(common + 1, len(parts) - 1))])


def _find_unnamed_path(
    names: Sequence[str],
    base: Collection[str],
    config: Mapping[str, Any],
    adapter_config: Mapping[str, Any] | None,
) -> str | None:
    """Return the path of the model; empty if it is the whole, None if nothing says it.

    Raises Unsupported where several models could be meant, where a known class has none of the
    names, and where peft might not load an adapter's.
    """
    implied = _implied_names(config)
    roots = adapter.find_roots(names) or _find_trl_models(names)
    names = base_names = [name for name in names if not _value_head(name)]
    if not roots:
        base_names = (
            names if adapter_config is None else [adapter.base_name(name) for name in names]
        )
        roots = _find_by_names(base_names, base) or _find_by_names(base_names, implied)
        roots = (
            roots
            or _find_by_head(base_names, config, adapter_config)
            or _find_by_embeddings(base_names, config)
        )
    if len(roots) > 1:
        raise Unsupported(
            f"{len(roots)} models in one module: at {', '.join(sorted(roots))}",
            hint=f"--source SOURCE@module={min(roots)}, or another of them",
        )
    if not roots and implied and not base and names:
        raise Unsupported(
            f"{names[0]}: {config['architectures'][0]}, which config.json names, has no such"
            f" tensor, nor any other of these {len(names)}",
            hint="--source SOURCE@module=PATH says where in the training's module the model is;"
            f" @module={TOP} writes all names as they are",
        )
    if not roots and adapter_config is not None and (doubtful_name := _find_doubtful_name(names)):
        raise Unsupported(
            f"{doubtful_name}: nothing says where in the training's module the model of this"
            " adapter begins, so peft may not load its name",
            hint="give the model that was trained with --base, or --source SOURCE@module=PATH;"
            f" @module={TOP} writes all names as they are",
        )
    return next(iter(roots), None)


def _find_doubtful_name(names: Iterable[str]) -> str:
    """Return an adapter's name that begins as no model of transformers does, else ""."""
    for name in names:
        first, second, *_ = [*name.split(".", 2), ""]
        if (
            second in _INNERMOST - _OF_SEVERAL
            and first not in _OF_SEVERAL
            and adapter.base_name(name) != name
        ):
            return name
    return ""


def _find_trl_models(names: Sequence[str]) -> set[str]:
    """Return the paths of models in TRL's wrappers: ``x.pretrained_model`` beside ``x.v_head``."""
    wrappers = {match[1] for match in map(_value_head, names) if match}
    paths = {f"{wrapper}{_TRL}" for wrapper in wrappers}
    return {path for path in paths if any(name.startswith(f"{path}.") for name in names)}


def _implied_names(config: Mapping[str, Any]) -> Collection[str]:
    """Return the tensor names that a configuration implies; empty if its class is not known.

    Those of a class without a head are those of the same class with one.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
        return ()
    with_head = classes[0].removesuffix("Model") + "ForCausalLM"
    shapes = config_shapes.shapes
    return (shapes(config) or shapes({**config, "architectures": [with_head]})).keys()


def _find_by_names(names: Sequence[str], expected: Collection[str]) -> set[str]:
    """Return the paths behind which most of the expected names are; ``{""}`` for the whole module.

    If `_find_behind` returns none, it is called again for the names below parts of `_INNERMOST`.
    """
    if paths := _find_behind(names, set(expected)):
        return paths
    split = (name.partition(".") for name in expected)
    return _find_behind(names, {inner for head, _, inner in split if head in _INNERMOST})


def _find_behind(names: Sequence[str], expected: set[str]) -> set[str]:
    """Return the paths in front of most of the ``expected`` names: {""} if they have none.

    If fewer than half of the names match at any path: {""} if one matches as it is, else empty.
    """
    if not expected:
        return set()
    least = min(len(expected), len(names)) / 2
    if sum(name in expected for name in names) >= max(1, least):
        return {""}
    counts = Counter(path for name in names for path, inner in _splits(name) if inner in expected)
    most = max(counts.values(), default=0)
    if most < max(1, least):
        return {""} if counts[""] else set()
    paths = {path for path, count in counts.items() if count == most}
    paths = {path for path in paths if not any(_is_inside(path, shorter) for shorter in paths)}
    return {_outermost(path, set(names), expected) for path in paths}


def _is_inside(path: str, outer: str) -> bool:
    """Return whether ``path`` lies inside of ``outer``, and is not the same."""
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield each path that a name may begin with, and what is left: "" first, to `_DEEPEST`."""
    yield "", name
    dot = -1
    for _ in range(_DEEPEST):
        dot = name.find(".", dot + 1)
        if dot < 0:
            return
        yield name[:dot], name[dot + 1 :]


def _outermost(path: str, names: Collection[str], expected: Collection[str]) -> str:
    """Return the path of the class with a head, if the expected names are of the class inside it.

    GPT-2's files have ``wte.weight``, a training has ``model.transformer.wte.weight`` and
    ``model.lm_head.weight``.
    """
    above, _, last = path.rpartition(".")
    is_model = last != "model" or any(n.startswith(("layers.", "decoder.")) for n in expected)
    if last not in _INNERMOST or not is_model or any(head in expected for head in _ALL_HEADS):
        return path
    heads = [f"{above}.{head}" for head in _ALL_HEADS] if above else _ALL_HEADS
    is_beside = any(head in names for head in heads)
    # with a name that only a class of transformers has inside of it, any other may be its head
    is_class = not above and last != "model" and not all(n.startswith(f"{path}.") for n in names)
    return above if is_beside or is_class else path


def _find_by_head(
    names: Sequence[str], config: Mapping[str, Any], adapter_config: Mapping[str, Any] | None
) -> set[str]:
    """Return the paths that stand before the output layer of the class that is configured.

    Each has at least a quarter of all names below it; {""} if the layer's name has no path.
    A class of several models (text and images) may have one further inside, which is not meant.
    """
    is_of_several = any(isinstance(v, dict) and "model_type" in v for v in config.values())
    classes = config.get("architectures")
    kind = classes[0] if isinstance(classes, list) and classes else None
    if kind is None and adapter_config is not None:
        kind = adapter_config.get("task_type") or "CAUSAL_LM"
    ends = next((v for k, v in _HEADS_OF.items() if isinstance(kind, str) and kind.endswith(k)), ())
    ends = tuple(end for end in ends if end != "output_projection.weight")  # FSMT's decoder's
    last = [name for name in names if name.endswith(ends)]
    # the first: ``cls.predictions.decoder.weight`` ends with the name of another class's head
    first = (next((p for p, inner in _splits(name) if inner in ends), None) for name in last)
    counts = Counter(path for path in first if path is not None)
    if is_of_several:
        counts = Counter({p: n for p, n in counts.items() if _is_of_several(p, names)})
    inside = {path: sum(name.startswith(f"{path}.") for name in names) for path in counts if path}
    # what is small is not the model, but a part of one whose own output layer is tied
    return {""} if "" in counts else {p for p, n in inside.items() if 4 * n >= len(names)}


def _find_by_embeddings(names: Sequence[str], config: Mapping[str, Any]) -> set[str]:
    """Return the paths before embeddings of a class ``…Model`` that hold 90 % of the names each.

    {""} if embeddings have no path; empty for other classes, and without embeddings.  A part that
    classes of transformers have themselves (``vision_model``) is no such path.
    """
    classes = config.get("architectures")
    kind = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(kind, str) or not kind.endswith("Model") or kind.endswith((*_HEADS_OF,)):
        return set()
    last = (name for name in names if name.endswith(_TOPS))
    paths = {path for name in last for path, inner in _splits(name) if inner in _TOPS}
    if "" in paths:
        return {""}
    paths = {path for path in paths if path.rpartition(".")[2] not in _PARTS_OF}
    inside = {path: sum(name.startswith(f"{path}.") for name in names) for path in paths}
    return {path for path, count in inside.items() if 10 * count >= 9 * len(names)}


def is_in_doubt(names: Collection[str]) -> bool:
    """Return whether all names begin with one word that no model of transformers begins with."""
    firsts = {name.partition(".")[0] for name in names}
    return len(firsts) == 1 and not firsts & (_INNERMOST | _OF_SEVERAL)


def _is_of_several(path: str, names: Iterable[str]) -> bool:
    """Return whether a path holds a model of several inputs, such as text and images.

    True if some names are of no text model, all of them lie below the path, and its last component
    is not one that such a model has inside (`_OF_SEVERAL`).
    """
    not_text = [name for name in names if _NOT_TEXT.search(name)]
    is_part = path.rpartition(".")[2] in _OF_SEVERAL
    return bool(not_text) and not is_part and all(name.startswith(f"{path}.") for name in not_text)
