"""Choose and edit the files beside the weights, and note where they contradict the weights.  Pure.

A model opens only with its configuration and tokenizer, so these are copied.  But a configuration
may lead its reader to code: `auto_map` names classes in Python files beside the weights, or in any
repository.  Such keys are found here, and taken out unless the user named the directory that they
come from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import FROM_TORCH, PRECISION, is_castable
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merger.plan import DType, FilePlan
from ckptsync.plain_json import parse
from ckptsync.tensors import Tensor

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
VERL_LORA = "lora_train_meta.json"
_TORCH = {ours: torchs for torchs, ours in FROM_TORCH.items()}
VALUE_HEAD = "value_head.safetensors"  # of TRL's models, as LLaMA-Factory names it
DAMAGED = "copy it again, or remove it and give another directory with --config-from"


def files_beside(names: Iterable[str], *, adapter: bool) -> tuple[str, ...]:
    """Return the files to copy beside the weights, the one that opens the model last.

    An adapter has no ``config.json`` of its own, a model no ``adapter_config.json``.
    """
    opening_file, excluded = (ADAPTER_CONFIG, CONFIG) if adapter else (CONFIG, ADAPTER_CONFIG)
    beside = (name for name in names if is_beside_weights(name) and name != excluded)
    return tuple(sorted(beside, key=lambda name: (name == opening_file, name)))


def is_code(name: str) -> bool:
    """Return whether a file beside the weights is a program."""
    return name.endswith(".py")


def is_configuration(name: str) -> bool:
    """Return whether a file's name ends in ``config.json``: its ``auto_map`` leads to code.

    In other files, such as vocabularies, ``auto_map`` is only a token.
    """
    return name.endswith("config.json")


def has_code(name: str, data: bytes) -> bool:
    """Return whether a file is code, or a configuration that leads to code.

    Raise Corrupt if a configuration is not JSON.
    """
    return is_code(name) or (is_configuration(name) and bool(find_code(name, data)))


def find_code(name: str, config: bytes) -> dict[str, Any]:
    """Return the keys of a configuration that lead to code, with their values.

    Keys of nested objects have the value None.  Raises Corrupt if it is not JSON.
    """
    content, keys = _parse_with_code(name, config)
    top = {}
    if isinstance(content, dict):
        top = {key: value for key, value in content.items() if _leads_to_code(key, value)}
    return {**dict.fromkeys(sorted(keys - top.keys())), **top}


def strip_code(name: str, config: bytes, allowed: Mapping[str, Any]) -> bytes:
    """Return a configuration without the keys that lead to code.

    Those of ``allowed`` stay at its top, with the values of ``allowed``.  A configuration without
    such keys is returned as it is, byte for byte.  Raises Corrupt if it is not JSON.
    """
    if not (keys := find_code(name, config)):
        return config
    content = _drop_code(_parse_with_code(name, config)[0])
    kept_entries = {
        key: allowed[key]
        for key in keys
        if allowed.get(key) is not None and isinstance(content, dict)
    }
    return (
        json.dumps(content | kept_entries if kept_entries else content, indent=2) + "\n"
    ).encode()


def parse_file(
    name: str, data: bytes, unique: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the content of a JSON file beside the weights; raise Corrupt if it is not JSON.

    ``unique``: see `plain_json.parse`.
    """
    try:
        return parse(data, name, unique=unique)
    except Corrupt as e:
        raise Corrupt(str(e), hint=DAMAGED) from e


def _parse_with_code(name: str, config: bytes) -> tuple[Any, set[str]]:
    """Return the content and keys that lead to code, repeated ones too; raise as `parse_file`."""
    keys: set[str] = set()

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object of the JSON; add its keys that lead to code to ``keys``."""
        keys.update(key for key, value in items if _leads_to_code(key, value))
        return dict(items)

    return parse_file(name, config, pairs), keys


def _drop_code(content: Any) -> Any:
    """Return JSON content without the keys that lead to code, at any depth."""
    if isinstance(content, dict):
        return {
            key: _drop_code(value)
            for key, value in content.items()
            if not _leads_to_code(key, value)
        }
    return [_drop_code(value) for value in content] if isinstance(content, list) else content


def _leads_to_code(key: str, value: Any) -> bool:
    """Return whether transformers or peft would import something because of this key.

    transformers does for ``auto_map``, ``custom_pipelines``, ``trust_remote_code`` and kernels of
    a repository; peft for a library in ``auto_mapping`` or ``megatron_core`` that is not its own.
    """
    if key in ("auto_map", "custom_pipelines"):
        return bool(value) and not isinstance(value, int | float)  # a number is that of a label
    if key == "trust_remote_code":
        return bool(value)
    if key == "auto_mapping":
        library = value.get("parent_library") if isinstance(value, dict) else value
        return bool(value) and (
            not isinstance(library, str) or library.partition(".")[0] != "transformers"
        )
    if key == "megatron_core":
        return bool(value) and (not isinstance(value, str) or value.partition(".")[0] != "megatron")
    if key.removesuffix("_internal").endswith(("attn_implementation", "experts_implementation")):
        return "/" in json.dumps(value)
    return False


def config_dtype(dtypes: Iterable[str], option: DType) -> str | None:
    """Return the dtype that ``config.json`` should name, or None to leave the file alone.

    It is the most precise of the floating types; None if there are none, or several with ``auto``,
    as the model itself mixes them.  `from_pretrained` casts to the dtype that is named there.
    """
    floating = set(filter(is_castable, dtypes))
    if not floating or (len(floating) > 1 and option == "auto"):
        return None
    return _TORCH[max(floating, key=PRECISION.__getitem__)]


def set_dtype(config: bytes, dtype: str | None) -> bytes:
    """Return ``config.json`` with ``dtype`` where it names one, written anew.

    Byte for byte as it is if nothing changes, it is not JSON, or ``dtype`` is None.
    """
    try:
        content = parse(config, CONFIG)
    except Corrupt:
        return config  # what it means is for its reader to say
    keys = [
        k
        for k in ("dtype", "torch_dtype")
        if isinstance(content, dict) and isinstance(content.get(k), str)
    ]
    if dtype is None or all(content[key] == dtype for key in keys):
        return config
    return (json.dumps(content | dict.fromkeys(keys, dtype), indent=2) + "\n").encode()


def make_lora_config(verl_config: Mapping[str, Any], names: Iterable[str]) -> bytes:
    """Return ``adapter_config.json`` for LoRA tensors of these names; empty without rank and alpha.

    ``verl_config``: the content of `VERL_LORA`.  Modules are named as verl's own merger does, by
    their last component.
    """
    rank, alpha = verl_config.get("r"), verl_config.get("lora_alpha")
    if type(rank) is not int or type(alpha) not in (int, float):
        return b""
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}
    config = {
        "peft_type": "LORA",
        "task_type": verl_config.get("task_type"),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def index_name(plans: Sequence[FilePlan]) -> str:
    """Return the index's name, such as ``model.safetensors.index.json``; empty if there is none.

    The files that it lists are named ``model-00001-of-00002.safetensors`` and so on.
    """
    first = plans[0].name.rpartition("/")[2] if plans else ""
    stem, numbers, _ = first.rpartition("-of-")
    return f"{stem.rpartition('-')[0]}.safetensors.index.json" if numbers else ""


def make_index(plans: Sequence[FilePlan]) -> bytes:
    """Return ``model.safetensors.index.json`` as transformers writes it, without a value head."""
    plans = [plan for plan in plans if plan.name != VALUE_HEAD]
    weight_map = {tensor.name: plan.name for plan in plans for tensor in plan.tensors}
    total = {
        "total_parameters": sum(prod(t.shape) for p in plans for t in p.tensors),
        "total_size": sum(t.size for p in plans for t in p.tensors),
    }
    content = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


NO_CONFIG = (
    "no config.json was found: give its directory with --config-from, so that from_pretrained can"
    " open the model"
)
NO_ADAPTER_CONFIG = (
    "no adapter_config.json was found: give its directory with --config-from; PeftModel cannot"
    " load the adapter without it, and no shard contains its scale (lora_alpha)"
)
FUSED = (
    "the experts of each layer are one tensor, which transformers 5 loads; vLLM and older"
    " transformers expect one tensor per expert: for these, merge with --names-of and the model"
    " that was trained"
)
PACKED = (
    "the weights are quantized by bitsandbytes and copied unchanged; loading them needs their"
    " quantization_config"
)
LORA = (
    "the shards contain LoRA weights, which from_pretrained ignores; if they are peft's, --source"
    " SOURCE@adapter writes the adapter, and @base the base model"
)


def notes_on_code(left_out: Sequence[str]) -> tuple[str, ...]:
    """Return a note on the files and keys of code ``left_out``, in a tuple; () without any."""
    if not left_out:
        return ()
    note = (
        f"not copied, since code in a checkpoint may be malicious: {', '.join(left_out)};"
        " ckptsync copies code from the directory of --config-from (head.config_from), or from"
        " the checkpoint with --allow-code (head.allow_code)"
    )
    return (note,)


def notes_on_model(
    tensors: Sequence[Tensor],
    config: Mapping[str, Any] | None,
    option: DType,
    *,
    has_base: bool = False,
) -> Iterator[str]:
    """Yield notes on what may keep a loader from opening the written model, or mislead it.

    A ``config.json`` that is missing or does not fit; quantized, fused or LoRA weights.

    Args:
        tensors: Those that are written.
        config: What ``config.json`` says; None without one.
        option: The user's ``--dtype``.
        has_base: A base model was given.

    """
    if config is None:
        yield NO_CONFIG
    content = config or {}
    # mixed precision stores what the optimizer works on: FSDP shards of a bf16 model are float32
    sections = [
        section for section in (content, content.get("text_config")) if isinstance(section, dict)
    ]
    named_dtypes = [
        section[key]
        for section in sections
        for key in ("dtype", "torch_dtype")
        if isinstance(section.get(key), str)
    ]
    dtype = named_dtypes[0] if named_dtypes else ""
    floating = {t.dtype for t in tensors if is_castable(t.dtype)}
    if (
        option == "auto"
        and len(floating) == 1
        and 0 < PRECISION.get(FROM_TORCH.get(dtype, ""), 0) < PRECISION[min(floating)]
    ):
        by_base = "" if has_base else ", --base DIR casts each to the base model's dtype"
        yield (
            f"config.json says {dtype}, but all weights are stored as {min(floating)}, and ckptsync"
            f" keeps that; --dtype casts all of them{by_base}"
        )
    if content.get("quantization_config") and all(
        is_castable(t.dtype) for t in tensors if len(t.shape) > 1
    ):
        yield (
            "config.json has a quantization_config, but no weight is quantized: loaders quantize"
            " them again, or fail; remove it from config.json to load the weights as they are"
        )
    if any(t.name.endswith(".SCB") or ".quant_state.bitsandbytes__" in t.name for t in tensors):
        yield PACKED
    if any(t.name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for t in tensors):
        yield FUSED
    if any(".lora_" in t.name for t in tensors):
        yield LORA
