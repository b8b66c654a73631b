"""Select a PEFT adapter, or the base model under it, from the tensors of a training.  Pure.

A training's state dict holds adapter and base model together, under names that
`PeftModel.from_pretrained` does not load.  Which tensors are the adapter's, and under which names
peft would save them, follows from their names alone: the rules are those of
``get_peft_model_state_dict`` and the tuners' ``_get_adapter_state_dict`` and
``_remove_adapter_name_from_key`` (peft 0.21.2: ``utils/save_and_load.py``,
``tuners/tuners_utils.py``, ``tuners/lora/model.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.merger.model_files import ADAPTER_CONFIG
from ckptsync.merger.tensor_names import EMBEDDINGS, HEADS, rename_tensors
from ckptsync.tensors import Tensor

STEM = "adapter_model"
PREFIX = "base_model.model."
EACH = "*"  # an adapter's name in a source, for all of them
_PARTS = re.compile(r"(.*)@(base|adapter|adapter=.+)", re.DOTALL)

# Tuners whose parameters are all saved, under peft's general rule: the adapter's name is the last
# part of a parameter's name, or the one before it.
TUNERS = tuple(
    """
    adaption_ beft_ boft_ c3a_ deft_ delora_ fourierft_ glora_ gralora_ hada_ hira_ hra_ ia3_
    ln_tuning_ lokr_ lora_ miss_ oft_ osf_ peanut_ poly_ psoft_ randlora_ road_ shira_ supertuning_
    waveft_
    """.split()  # noqa: SIM905
)
_PLAIN_TUNERS = (*TUNERS, "trainable_tokens_")
# What the others save is computed, shared or named otherwise; by how their parameters' names begin.
_REFUSED_KINDS = {
    "adamss_": "AdaMSS",
    "frod_": "FRoD",
    "internal_xlora": "X-LoRA",
    "lily_": "Lily",
    "lora_E": "AdaLoRA",
    "peanut_decoders": "PEANuT with a depth",
    "peanut_encoders": "PEANuT with a depth",
    "pvera_": "PVeRA",
    "ranknum": "AdaLoRA",
    "shadow_": "Shadow",
    "tinylora_": "TinyLoRA",
    "unilora_": "UniLoRA",
    "vblora_": "VB-LoRA",
    "vera_": "VeRA",
}
# What peft saves with these although it is not trained, so that a state dict need not have it.
_UNTRAINED = {
    "delora_": ("DeLoRA", "delora_w_norm"),
    "randlora_": ("RandLoRA", "randlora_A"),
    "shira_": ("SHiRA", "shira_indices"),
    "supertuning_": ("SuperTuning", "supertuning_indices"),
}
_RECOMPUTED = ("save_projection", "save_precomputed_indices")  # False: peft does not save it
_EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})  # peft's EMBEDDING_LAYER_NAMES
_BASE, _ENCODER = "base_model", "prompt_encoder"  # what a PeftModel has at its top
_SAVED, _TOKENS, _ORIGINAL = "modules_to_save", "token_adapter", "original_module"
_ENDS = frozenset(
    "weight bias X Xd Xu zeros S_low U_low V_low module_logits vector_a vector_b".split()  # noqa: SIM905
)
# What an encoder has behind the adapter's name: a model's part may be called so, too (SAM's).
_ENCODED = frozenset(
    """
    embedding trainable_embedding frozen_embedding delta_embedding mlp_head lstm_head transform
    prefix_task_cols prefix_task_rows
    """.split()  # noqa: SIM905
)
_SAVED_PROMPTS = ("prompt_embeddings", "prefix_task_")
_PROMPTS = ("prompt_encoder.", *_SAVED_PROMPTS)
_RANK_AXES = {".lora_A.weight": 0, ".lora_embedding_A": 0}
_RANK_AXES |= {".lora_B.weight": 1, ".lora_embedding_B": 1}
_SAVE = "save it with save_pretrained from the training, and merge that"


class SeveralAdapters(Unsupported):
    """A state dict has adapters of these ``names``, and none was chosen."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{len(names)} adapters in one checkpoint: {', '.join(names)}",
            hint=f"--source SOURCE@adapter={names[0]}, or another of them",
        )
        self.names = tuple(names)


@dataclass(frozen=True, slots=True)
class Selected:
    """What is to be written.

    ``adapter``: its name in the state dict (``""`` if names have none), None if it is a model.
    """

    tensors: tuple[Tensor, ...]
    adapter: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _AdapterTensor:
    """An adapter tensor, and the module that it adapts.

    ``adapter`` is the adapter's name, ``""`` where peft took it out; ``saved`` is the name under
    which peft saves the tensor.
    """

    module: str
    adapter: str
    saved: str


def split_source(source: str | None) -> tuple[str | None, str]:
    """Split ``dcp:x@base`` into ``dcp:x`` and ``base``, the part of the source to write.

    The part is ``base``, ``adapter`` or ``adapter=NAME``; empty if ``source`` names none.
    """
    match = _PARTS.fullmatch(source or "")
    return (match[1] or None, match[2]) if match else (source, "")


def select(tensors: Sequence[Tensor], part: str, config: Mapping[str, Any] | None) -> Selected:
    """Return the tensors of the adapter, or of the base model if ``part`` is ``base``.

    If no tensor is an adapter's, all tensors are returned, as a model.

    Args:
        tensors: Of one set of weights.
        part: As `split_source` returns it.
        config: What ``adapter_config.json`` says; None without such a file.

    Raises:
        SeveralAdapters: Several adapters are stored, and ``part`` names none.
        Unsupported: The part is not stored, or its names do not say what peft would save.

    """
    items = _adapter_tensors(
        [t.name for t in tensors], is_expected=bool(part) or config is not None
    )
    if items:
        return (
            _select_base(tensors, items)
            if part == "base"
            else _select_adapter(tensors, items, part.partition("=")[2], config or {})
        )
    if part:
        raise Unsupported(f"@{part}: no PEFT adapter is among these {len(tensors)} tensors")
    return Selected(tuple(tensors), None)


def check_rank(selected: Selected, config: Mapping[str, Any]) -> None:
    """Raise Corrupt if the weights have another rank than ``adapter_config.json`` says.

    Nothing is checked for other kinds than LoRA, or where ranks vary between modules.
    """
    rank = config.get("r")
    has_varying_ranks = any(
        config.get(key) for key in ("rank_pattern", "target_parameters", "layer_replication")
    )
    if config.get("peft_type") != "LORA" or has_varying_ranks or type(rank) is not int:
        return
    for tensor in selected.tensors:
        axis = next((axis for end, axis in _RANK_AXES.items() if tensor.name.endswith(end)), None)
        if axis is not None and tensor.shape[axis : axis + 1] != (rank,):
            raise Corrupt(
                f"{ADAPTER_CONFIG}: rank {rank}, and {tensor.name} has {tensor.shape}",
                hint="it is another adapter's: give this one's directory",
            )


def find_roots(names: Iterable[str]) -> set[str]:
    """Return the paths in a training's module at which PEFT models begin, such as ``policy``.

    The path is empty for a PEFT model that is not inside of another module.
    """
    roots: set[str] = set()
    root_prefixes: tuple[str, ...] = ()  # what names begin with whose root was found
    for name in names:  # there may be a million
        if (_BASE not in name and _ENCODER not in name) or name.startswith(root_prefixes):
            continue
        parts = name.split(".")
        depth = next((n for n, part in enumerate(parts) if part in (_BASE, _ENCODER)), len(parts))
        is_encoder = parts[depth : depth + 1] == [_ENCODER] and not _ENCODED.isdisjoint(
            parts[depth + 2 : depth + 3]
        )
        if is_encoder or any(map(_is_adapters, parts[depth:])):
            roots.add(".".join(parts[:depth]))
            root_prefixes = tuple(f"{root}.{_BASE}." if root else f"{_BASE}." for root in roots)
    return roots


def base_name(name: str) -> str:
    """Return the base model's name of the weight that an adapter's tensor adapts.

    For any other tensor, return the name that the base model has for it.
    """
    parts = name.split(".")
    index = next((n for n, part in enumerate(parts) if n and _is_adapters(part)), None)
    if index is not None:
        parts = [*parts[:index], *(parts[index + 2 :] if parts[index] == _SAVED else ["weight"])]
    return ".".join(part for part in parts if part not in ("base_layer", _ORIGINAL))


def _is_adapters(part: str) -> bool:
    """Return whether peft gives this component only to an adapter's tensors."""
    return part == _SAVED or part.startswith((*_PLAIN_TUNERS, *_REFUSED_KINDS))


def _adapter_tensors(names: Sequence[str], *, is_expected: bool) -> dict[str, _AdapterTensor]:
    """Return name → adapter tensor; empty if this is no state dict of a PEFT model.

    An adapter that was injected into a model (`add_adapter`) has its name in each of its tensors,
    but not the prefix that peft saves it with.  Some models have such parts of their own
    (Phi-4-multimodal), so injected adapters are searched for only if ``is_expected``.  Raises
    Unsupported for adapters whose saved tensors peft computes.
    """
    starts = ("base_model.", *_SAVED_PROMPTS)
    is_whole = any(n.startswith(starts) for n in names) or "" in find_roots(names)
    if not is_whole:
        # one pass over a model that has no adapter, be its tensors a million
        text = "\n".join(names)
        if not is_expected or not any(f".{tuner}" in text for tuner in _PLAIN_TUNERS):
            return {}
    prefix = "" if is_whole else PREFIX
    items = {name: item for name in names if (item := _split_name(name, prefix))}
    return items if is_whole or all(item.adapter for item in items.values()) else {}


def _split_name(name: str, prefix: str) -> _AdapterTensor | None:
    """Return what a name such as ``…lora_A.default.weight`` says; None if it is no adapter's.

    ``prefix`` is put before the saved name.  Raises Unsupported for kinds of adapters whose saved
    tensors peft computes.
    """
    parts = name.split(".")
    if name.startswith(_PROMPTS):
        # the embedding of the virtual tokens is saved as it is; what an encoder computes is not in
        # the shards
        if len(parts) == 1:
            return _AdapterTensor("", "", name)
        if len(parts) == 3 and parts[2].startswith("prefix_task_"):  # multitask prompt tuning
            return _AdapterTensor("", parts[1], parts[2])
        if len(parts) != 4 or parts[2:] != ["embedding", "weight"]:
            raise Unsupported(
                f"{name}: peft has to run this prompt encoder (P-tuning, prefix tuning with a"
                " projection, CPT, Cartridge) to save it, so ckptsync cannot merge its shards",
                hint=_SAVE,
            )
        return _AdapterTensor("", parts[1], "prompt_embeddings")
    for index, component in enumerate(parts[1:], 1):
        if component != _SAVED and not component.startswith((*_PLAIN_TUNERS, *_REFUSED_KINDS)):
            continue
        module, tail = ".".join(parts[:index]), parts[index + 1 :]
        if component == _SAVED:
            if tail:
                return _AdapterTensor(module, tail[0], prefix + ".".join([module, *tail[1:]]))
            continue
        if not tail or (len(tail) == 1 and tail[0] in _ENDS):
            return _AdapterTensor(module, "", prefix + name)
        kind = next(
            (_REFUSED_KINDS[start] for start in _REFUSED_KINDS if component.startswith(start)), ""
        )
        if kind or len(tail) > 2 or (len(tail) == 2 and tail[1] not in _ENDS):
            raise Unsupported(
                f"{name}: ckptsync cannot merge sharded adapters of the kind {kind or component}",
                hint=_SAVE,
            )
        # DoRA: peft saves it without ".weight"
        end = [] if component == "lora_magnitude_vector" else tail[1:]
        return _AdapterTensor(module, tail[0], prefix + ".".join([module, component, *end]))
    return None


def _select_adapter(
    tensors: Sequence[Tensor],
    items: Mapping[str, _AdapterTensor],
    choice: str,
    config: Mapping[str, Any],
) -> Selected:
    """Return the adapter named ``choice``, or the only one if ``choice`` is empty.

    Tensors of the base model that peft saves with the adapter are included; a note counts those
    that are left out.  Raises SeveralAdapters without a choice, Unsupported for a name that is not
    stored, for PEFT models inside one another, and for adapters whose untrained tensors are
    missing.
    """
    names = sorted({item.adapter for item in items.values()} - {""})
    if choice and choice not in names:
        choices = ", ".join(names) or "only one, without a name"
        raise Unsupported(
            f"@adapter={choice}: no adapter of that name", hint=f"there are: {choices}"
        )
    if len(names) > 1 and not choice:
        raise SeveralAdapters(names)
    name = choice or (names[0] if names else "")
    chosen = {
        n: i.saved
        for n, i in items.items()
        if i.adapter in (name, "") and not _is_of_tied_head(i, config)
    }
    _check_untrained(chosen.values(), config)
    other_names = [t.name for t in tensors if t.name not in items]
    # of embeddings peft saves the base layer too: it proves nothing where the adapter's name was
    # taken out
    layers = {
        f"{n.partition('.base_layer.')[0].rpartition('.')[2]}.weight"
        for n in other_names
        if _is_base(n, items)
    }
    has_base = any(name or layer not in (*EMBEDDINGS, *HEADS) for layer in layers)
    saved_with = [n for n in other_names if not has_base or _is_saved_with(n, config)]
    chosen |= {n: n if n.startswith("base_model.") else PREFIX + n for n in saved_with}
    if nested := next((n for n, saved in chosen.items() if f".{_BASE}." in saved), None):
        raise Unsupported(
            f"{nested}: a PEFT model inside of another, whose names peft would not load",
            hint=f"--source SOURCE@module={nested[: nested.rindex(f'.{_BASE}.')]} writes the inner"
            " one",
        )
    selected = _rename_selected(tensors, chosen)
    notes = []
    if name:
        notes.append(
            f"a PEFT adapter, named {name} in the shards: {len(selected)} tensors, under the"
            " names that peft loads"
        )
    if left_out := len(other_names) - len(saved_with):
        notes.append(
            f"{left_out} tensors of its base model are in the same shards and are left out:"
            " --source SOURCE@base writes them"
        )
    return Selected(selected, name, tuple(notes))


def _select_base(tensors: Sequence[Tensor], items: Mapping[str, _AdapterTensor]) -> Selected:
    """Return the base model under its own names.

    An embedding whose tokens are adapted is kept once.  Raises Unsupported if the base model is not
    stored, or cannot be told from a prompt-tuned one.
    """
    other_names = [t.name for t in tensors if t.name not in items]
    if _leaves_base(items):
        raise Unsupported(
            "@base: a prompt-tuned model's own names cannot be told from the adapter's",
            hint="prompt tuning does not change the base model: use the original",
        )
    if not any(_is_base(name, items) for name in other_names):
        raise Unsupported("@base: these shards hold an adapter without its base model")
    modules = {item.module for item in items.values()}
    names: dict[str, str] = {}
    for stored in other_names:
        name = stored
        while (cut := name.partition(".base_layer."))[1] and cut[0] in modules:
            name = f"{cut[0].removesuffix(f'.{_TOKENS}')}.{cut[2]}"
        module, separator, tail = name.partition(f".{_ORIGINAL}.")
        if separator and f"{module}.{_TOKENS}" in modules:
            continue  # a second name of the embedding
        if separator and module in modules:
            name = f"{module}.{tail}"
        names[stored] = name.removeprefix(PREFIX)
    note = (
        f"the base model alone, without the {len(items)} tensors of the adapter in the same shards"
    )
    return Selected(_rename_selected(tensors, names), None, (note,))


def _rename_selected(tensors: Sequence[Tensor], names: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return the tensors in ``names``, renamed, without other ties; raise as `rename_tensors`."""
    selected = (t for t in tensors if t.name in names)
    return rename_tensors(
        [t if t.tied in names else replace(t, tied=None) for t in selected], names
    )


def _is_of_tied_head(item: _AdapterTensor, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor holds trained tokens of an output head that is tied to the embedding.

    True for tokens in a head's module if the configuration has ``trainable_token_indices`` as a
    list. peft gives such a list to the embedding, adapts the head only if both are tied, and does
    not save the head's copy.
    """
    layer, _, component = item.module.rpartition(".")
    has_list = isinstance(config.get("trainable_token_indices"), list)
    return has_list and component == _TOKENS and f"{layer}.weight".endswith(HEADS)


def _leaves_base(items: Mapping[str, _AdapterTensor]) -> bool:
    """Return whether the adapter trains only prompts, so that nothing of the base is renamed."""
    return any(
        item.saved.startswith(_PROMPTS) or ".adaption_" in item.saved for item in items.values()
    )


def _check_untrained(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Raise Unsupported if a module lacks an untrained tensor that peft needs to load it.

    Nothing is checked if ``config`` has one of `_RECOMPUTED` as False.
    """
    if any(config.get(key) is False for key in _RECOMPUTED):
        return
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        module, _, parameter = name.rpartition(".")
        modules[module].add(parameter)
    for module, parameters in modules.items():
        for start, (kind, needed) in _UNTRAINED.items():
            if needed not in parameters and any(
                parameter.startswith(start) for parameter in parameters
            ):
                raise Unsupported(
                    f"{module}: {kind} without its {needed}, which peft saves with it and this"
                    " state dict has not",
                    hint=_SAVE,
                )


def _is_base(name: str, items: Mapping[str, _AdapterTensor]) -> bool:
    """Return whether a name can only be the base model's, and not be trained beside the adapter.

    True for all names beside a prompt adapter, for base layers but their biases, and for originals.
    """
    return (
        _leaves_base(items)
        or (".base_layer." in name and not name.endswith(".bias"))
        or f".{_ORIGINAL}." in name
    )


def _is_saved_with(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether peft saves this tensor of the base model with the adapter.

    It saves biases that ``bias`` names, and the base layer of embeddings if ``target_modules`` is a
    pattern or names one of `_EMBEDDINGS`, unless tokens are trained.
    """
    bias, targets = config.get("bias", "none"), config.get("target_modules")
    if bias == "all" and name.endswith(".bias"):
        return True
    if isinstance(bias, str) and bias.endswith("_only") and name.endswith(".base_layer.bias"):
        return True
    # a string is a pattern that the module's name has matched, since there is an adapter of it
    is_adapted = isinstance(targets, str) or (
        isinstance(targets, list) and _EMBEDDINGS & {t for t in targets if isinstance(t, str)}
    )
    module = name.partition(".base_layer.")[0]
    is_embedding = module != name and module.rpartition(".")[2] in _EMBEDDINGS
    has_tokens = (
        config.get("peft_type") == "TRAINABLE_TOKENS"
        or config.get("trainable_token_indices") is not None
    )
    return bool(is_adapted and is_embedding and not has_tokens)
