"""State dicts of PEFT models: what is the adapter's, what the base model's, and the names under which peft loads an adapter.  Pure.

Follows ``get_peft_model_state_dict`` and the tuners' ``_get_adapter_state_dict``, ``_remove_adapter_name_from_key`` (peft 0.21.2:
``utils/save_and_load.py``, ``tuners/tuners_utils.py``, ``tuners/lora/model.py``), by names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.merge.rename import renamed
from ckptsync.merge.ties import EMBEDDINGS, HEADS
from ckptsync.model import Tensor

STEM = "adapter_model"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
_PARTS = re.compile(r"(.*)@(base|adapter|adapter=.+)", re.DOTALL)

# Tuners whose parameters are all saved, under peft's general rule; of the others some are computed when they are saved.
TUNERS = (
    "lora_",
    "ia3_",
    "hada_",
    "lokr_",
    "oft_",
    "boft_",
    "c3a_",
    "fourierft_",
    "hra_",
    "miss_",
    "ln_tuning_",
)
_KNOWN = (*TUNERS, "trainable_tokens_")
_OTHERS = tuple(
    "adamss_ adaption_prompt beft_ deft_ delora_ frod_ glora_ gralora_ hira_ internal_xlora lily_ lora_E osf_ peanut_ poly_ psoft_"  # noqa: SIM905
    " pvera_ randlora_ ranknum road_ shadow_ shira_ supertuning_ tinylora_ unilora_ vblora_ vera_ waveft_".split()
)
_EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})  # peft's EMBEDDING_LAYER_NAMES
_SAVED, _TOKENS, _ORIGINAL = "modules_to_save", "token_adapter", "original_module"
_ENDS = ("weight", "bias")
_PROMPTS = ("prompt_encoder.", "prompt_embeddings")


@dataclass(frozen=True, slots=True)
class Selected:
    """What is to be written.  ``adapter``: its name in the state dict (``""`` if the names have none), or None if it is a model."""

    tensors: tuple[Tensor, ...]
    adapter: str | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    """One adapter tensor: the module it adapts, the adapter's name (``""`` where peft has taken it out), its name as peft saves it."""

    module: str
    adapter: str
    saved: str


def split_source(wanted: str | None) -> tuple[str | None, str]:
    """``dcp:x@base`` → ``dcp:x`` and ``base``: one half of a state dict that holds an adapter and its base model."""
    match = _PARTS.fullmatch(wanted or "")
    return (match[1] or None, match[2]) if match else (wanted, "")


def select(tensors: Sequence[Tensor], part: str, config: Mapping[str, Any] | None) -> Selected:
    """The adapter where there is one, with what peft saves with it, or with ``part`` ``base`` the model under it.

    ``part``: as `split_source` gives it; ``config``: ``adapter_config.json``, where it is known.  Raises Unsupported where names do not tell.
    """
    items = _items(tensors, is_told=bool(part) or config is not None)
    if not items:
        if part:
            raise Unsupported(f"@{part}: no PEFT adapter is among these {len(tensors)} tensors")
        return Selected(tuple(tensors), None)
    if part == "base":
        return _base(tensors, items)
    return _adapter(tensors, items, part.partition("=")[2], config or {})


def check(selected: Selected, config: Mapping[str, Any]) -> None:
    """Raise Corrupt if ``adapter_config.json`` is another adapter's: its rank is not that of the weights."""
    rank = config.get("r")
    varies = any(config.get(key) for key in ("rank_pattern", "target_parameters", "layer_replication"))
    if config.get("peft_type") != "LORA" or varies or type(rank) is not int:
        return
    for tensor in selected.tensors:
        if tensor.name.endswith((".lora_A.weight", ".lora_embedding_A")) and tensor.shape[:1] != (rank,):
            raise Corrupt(
                f"{CONFIG}: rank {rank}, and {tensor.name} has {tensor.shape}",
                hint="it is another adapter's: give this one's directory",
            )


def _items(tensors: Sequence[Tensor], *, is_told: bool) -> dict[str, _Item]:
    """Name → adapter tensor; empty if this is no state dict of a PEFT model.

    An adapter that was injected into a model (`add_adapter`) has its name in each of its tensors, but not the prefix that peft saves it
    with.  Some models have such parts of their own (Phi-4-multimodal), so it ``is_told`` that there is one.
    """
    names = [t.name for t in tensors]
    is_whole = any(n.startswith(("base_model.", *_PROMPTS)) for n in names)
    text = "" if is_whole else "\n".join(names)  # one look at a model that has no adapter, be its tensors a million
    if not is_whole and not (is_told and any(f".{tuner}" in text for tuner in _KNOWN)):
        return {}
    found = {name: item for name in names if (item := _item(name, "" if is_whole else PREFIX))}
    return found if is_whole or all(item.adapter for item in found.values()) else {}


def _item(name: str, prefix: str) -> _Item | None:
    parts = name.split(".")
    if name.startswith(_PROMPTS):
        return _prompt(name, parts)
    for at, part in enumerate(parts[1:], 1):
        if part == _SAVED and at + 1 < len(parts):
            return _Item(".".join(parts[:at]), parts[at + 1], prefix + ".".join(parts[:at] + parts[at + 2 :]))
        if part.startswith((*_KNOWN, *_OTHERS)):
            return _tuned(name, parts, at, prefix)
    return None


def _tuned(name: str, parts: Sequence[str], at: int, prefix: str) -> _Item | None:
    """``…lora_A.default.weight``, ``…lora_embedding_A.default``, or the same without the adapter's name."""
    module, own, rest = ".".join(parts[:at]), parts[at], list(parts[at + 1 :])
    is_bare = not rest or (len(rest) == 1 and rest[0] in _ENDS)
    if is_bare:
        return _Item(module, "", prefix + name)
    if own.startswith(_OTHERS) or len(rest) > 2 or (len(rest) == 2 and rest[1] not in _ENDS):
        raise Unsupported(
            f"{name}: peft computes what it saves of this kind of adapter, or nests it in a way that is not known",
            hint="save it with save_pretrained from the training, and merge that",
        )
    end = [] if own == "lora_magnitude_vector" else rest[1:]  # DoRA: peft saves it without ".weight"
    return _Item(module, rest[0], prefix + ".".join([*parts[: at + 1], *end]))


def _prompt(name: str, parts: Sequence[str]) -> _Item:
    """Prompt and prefix tuning save the embedding of the virtual tokens as it is; what an encoder computes is not in the shards."""
    if parts == ["prompt_embeddings"]:
        return _Item("", "", name)
    if len(parts) != 4 or parts[2:] != ["embedding", "weight"]:
        raise Unsupported(
            f"{name}: what peft saves of this prompt encoder is computed by running it",
            hint="save it with save_pretrained from the training, and merge that",
        )
    return _Item("", parts[1], "prompt_embeddings")


def _adapter(tensors: Sequence[Tensor], items: Mapping[str, _Item], wanted: str, config: Mapping[str, Any]) -> Selected:
    name = _adapter_name(items, wanted)
    others = [t for t in tensors if t.name not in items]
    chosen = {n: i.saved for n, i in items.items() if i.adapter in (name, "")}
    base = [t for t in others if _is_base(t.name, items) and (name or not _is_embedding(t.name))]
    with_it = [t.name for t in others if not base or _is_saved_with(t.name, config)]
    chosen |= {n: n if n.startswith("base_model.") else PREFIX + n for n in with_it}
    kept = renamed([_untied(t, chosen) for t in tensors if t.name in chosen], chosen)
    return Selected(kept, name, _notes(kept, name, len(others) - len(with_it) if base else 0))


def _untied(tensor: Tensor, chosen: Mapping[str, str]) -> Tensor:
    return tensor if tensor.tied in chosen else replace(tensor, tied=None)


def _adapter_name(items: Mapping[str, _Item], wanted: str) -> str:
    names = sorted({item.adapter for item in items.values()} - {""})
    if wanted and wanted not in names:
        raise Unsupported(
            f"@adapter={wanted}: no adapter of that name", hint=f"there are: {', '.join(names) or 'only one, without a name'}"
        )
    if len(names) > 1 and not wanted:
        raise Unsupported(
            f"{len(names)} adapters in one checkpoint: {', '.join(names)}",
            hint=f"--source SOURCE@adapter={names[0]}, or another of them",
        )
    return wanted or (names[0] if names else "")


def _is_base(name: str, items: Mapping[str, _Item]) -> bool:
    """Whether this shows that the base model is here too, rather than something that was trained beside the adapter."""
    is_prompt = any(item.saved == "prompt_embeddings" for item in items.values())
    return is_prompt or (".base_layer." in name and not name.endswith(".bias")) or f".{_ORIGINAL}." in name


def _is_saved_with(name: str, config: Mapping[str, Any]) -> bool:
    """What peft saves of the base model with the adapter: biases as configured, and embeddings that are adapted themselves."""
    bias, targets = config.get("bias", "none"), config.get("target_modules")
    if bias == "all" and name.endswith(".bias"):
        return True
    if isinstance(bias, str) and bias.endswith("_only") and name.endswith(".base_layer.bias"):
        return True
    is_adapted = isinstance(targets, list) and _EMBEDDINGS & {t for t in targets if isinstance(t, str)}
    module = name.partition(".base_layer.")[0]
    is_meant = module != name and module.rpartition(".")[2] in _EMBEDDINGS
    return bool(is_adapted and is_meant and config.get("trainable_token_indices") is None)


def _is_embedding(name: str) -> bool:
    """Of these peft saves the base layer too, so that it proves nothing where the adapter's name was taken out."""
    return f"{name.partition('.base_layer.')[0].rpartition('.')[2]}.weight" in (*EMBEDDINGS, *HEADS)


def _notes(kept: Sequence[Tensor], name: str, left_out: int) -> tuple[str, ...]:
    found = []
    if name:
        found.append(f"a PEFT adapter, named {name} in the shards: {len(kept)} tensors, under the names that peft loads")
    if left_out:
        found.append(
            f"{left_out} tensors of its base model are in the same shards and are left out: --source SOURCE@base writes them"
        )
    return tuple(found)


def _base(tensors: Sequence[Tensor], items: Mapping[str, _Item]) -> Selected:
    others = [t for t in tensors if t.name not in items]
    if any(item.saved == "prompt_embeddings" for item in items.values()):
        raise Unsupported(
            "@base: a prompt-tuned model's own names cannot be told from the adapter's", hint="its base is not changed: use it"
        )
    if not any(_is_base(t.name, items) for t in others):
        raise Unsupported("@base: these shards hold an adapter without its base model")
    modules = {item.module for item in items.values()}
    names = {t.name: _base_name(t.name, modules) for t in others}
    names = {n: to for n, to in names.items() if to}
    return Selected(renamed([_untied(t, names) for t in others if t.name in names], names), None, _base_notes(len(items)))


def _base_notes(count: int) -> tuple[str, ...]:
    return (f"the base model alone, without the {count} tensors of the adapter in the same shards",)


def _base_name(name: str, modules: Iterable[str]) -> str:
    """The base model's own name; ``""`` for a second name of an embedding whose tokens are adapted."""
    while (cut := name.partition(".base_layer."))[1] and cut[0] in modules:
        module, _, rest = cut
        name = f"{module.removesuffix(f'.{_TOKENS}')}.{rest}"
    module, found, rest = name.partition(f".{_ORIGINAL}.")
    if found and f"{module}.{_TOKENS}" in modules:
        return ""
    if found and module in modules:
        name = f"{module}.{rest}"
    return name.removeprefix(PREFIX)
