"""What stands beside the weights: the index, the configuration, the tokenizer.  Pure.

A configuration may lead its reader to code: `auto_map` names classes in Python files beside the weights, or in any repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import FROM_TORCH, PRECISION, is_castable
from ckptsync.merge.plan import DType, FilePlan
from ckptsync.parsing import parse

# What `from_pretrained` and inference servers read beside the weights, and nothing of a training's state.
_STEMS = (
    *("config", "generation_config", "adapter_config", "quantization_config"),
    *("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab", "chat_template"),
    *("preprocessor_config", "processor_config", "video_preprocessor_config", "image_processor_config", "feature_extractor_config"),
)
_OTHERS = (
    "chat_template.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
NAMES = (*(f"{stem}.json" for stem in _STEMS), *_OTHERS)
_CODE = re.compile(r"(configuration|modeling|tokenization|processing|image_processing)_\w+\.py", re.ASCII)

_CONFIGS = ("config.json", "adapter_config.json")
_TORCH = {ours: torchs for torchs, ours in FROM_TORCH.items()}


DAMAGED = "fetch it again; or take it away and name the directory of another with --config-from"


def is_beside(name: str) -> bool:
    """Whether a file at the top of a checkpoint belongs to the model rather than to its training."""
    return name in NAMES or bool(_CODE.fullmatch(name))


def is_code(name: str) -> bool:
    """Whether a file beside the weights is a program."""
    return name.endswith(".py")


def is_configuration(name: str) -> bool:
    """Whether a file beside the weights may lead its reader to code.  Vocabularies may not: ``auto_map`` is a token there."""
    return name.endswith("config.json")


def code_of(name: str, config: bytes) -> dict[str, Any]:
    """Return the keys of a configuration that lead to code, with their values; of nested objects the keys alone, with None.

    Raises Corrupt if it is not JSON.
    """
    content, nested = _parsed(name, config)
    top = {key: value for key, value in content.items() if _leads_to_code(key, value)} if isinstance(content, dict) else {}
    return {**dict.fromkeys(sorted(nested - top.keys())), **top}


def has_code(name: str, data: bytes) -> bool:
    """Whether a file beside the weights is code, or leads to some.  Raises Corrupt of a configuration that is not JSON."""
    return is_code(name) or (is_configuration(name) and bool(code_of(name, data)))


def without_code(name: str, config: bytes, known: Mapping[str, Any]) -> bytes:
    """Return a configuration without the keys of `code_of`; one that ``known`` has stays at the top, with the value that it has there.

    One without such keys is left as it is, byte for byte.  Raises Corrupt if it is not JSON.
    """
    if not (found := code_of(name, config)):
        return config
    content = _cleaned(_parsed(name, config)[0])
    kept = {key: known[key] for key in found if known.get(key) is not None and isinstance(content, dict)}
    return (json.dumps(content | kept if kept else content, indent=2) + "\n").encode()


def parsed(name: str, data: bytes, unique: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """As `parse`, of a file beside the weights: a model beside one that is damaged cannot be opened."""
    try:
        return parse(data, name, unique=unique)
    except Corrupt as e:
        raise Corrupt(str(e), hint=DAMAGED) from e


def _parsed(name: str, config: bytes) -> tuple[Any, set[str]]:
    """The content, and all keys in it that lead to code, also those of which a later one of the same name takes the place."""
    found: set[str] = set()

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found.update(key for key, value in items if _leads_to_code(key, value))
        return dict(items)

    return parsed(name, config, pairs), found


def _cleaned(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _cleaned(value) for key, value in content.items() if not _leads_to_code(key, value)}
    return [_cleaned(value) for value in content] if isinstance(content, list) else content


def _leads_to_code(key: str, value: Any) -> bool:
    """Of transformers (``auto_map``, ``custom_pipelines``, kernels from a repository), peft (modules to import), and whoever believes ``trust_remote_code``."""
    if key in ("auto_map", "custom_pipelines"):
        return bool(value) and not isinstance(value, int | float)  # a number is that of a label
    if key == "trust_remote_code":
        return bool(value)
    if key == "auto_mapping":
        library = value.get("parent_library") if isinstance(value, dict) else value
        return bool(value) and (not isinstance(library, str) or library.partition(".")[0] != "transformers")
    if key == "megatron_core":
        return bool(value) and (not isinstance(value, str) or value.partition(".")[0] != "megatron")
    if key.removesuffix("_internal").endswith(("attn_implementation", "experts_implementation")):
        return "/" in json.dumps(value)
    return False


def beside(names: Iterable[str], *, adapter: bool) -> tuple[str, ...]:
    """The files to copy; an adapter has no ``config.json`` of its own, a model no ``adapter_config.json``.

    Its own comes last: without it nothing opens what stands there, be it whole or not.
    """
    own, other = _CONFIGS[::-1] if adapter else _CONFIGS
    return tuple(sorted((name for name in names if is_beside(name) and name != other), key=lambda name: (name == own, name)))


def dtype_to_tell(plans: Sequence[FilePlan], asked: DType) -> str | None:
    """The dtype that ``config.json`` should name, since `from_pretrained` casts to it: torch's word, or None for leave it alone.

    The one floating type of all tensors; of several the most precise, unless the model itself mixes them (``auto``).
    """
    return told_dtype({t.dtype for p in plans for t in p.tensors}, asked)


def told_dtype(dtypes: Iterable[str], asked: DType) -> str | None:
    """The same of the dtypes of all tensors."""
    found = set(filter(is_castable, dtypes))
    if not found or (len(found) > 1 and asked == "auto"):
        return None
    return _TORCH[max(found, key=PRECISION.__getitem__)]


def with_dtype(config: bytes, dtype: str | None) -> bytes:
    """``config.json`` naming ``dtype`` where it names one; a file that names none, or cannot be read, is left as it is."""
    try:
        content = parse(config, "config.json")
    except Corrupt:
        return config  # it is copied as it is; what it means is for its reader to say
    keys = [k for k in ("dtype", "torch_dtype") if isinstance(content, dict) and isinstance(content.get(k), str)]
    if dtype is None or all(content[key] == dtype for key in keys):
        return config
    return (json.dumps(content | dict.fromkeys(keys, dtype), indent=2) + "\n").encode()


def index(plans: Sequence[FilePlan]) -> bytes:
    """``model.safetensors.index.json`` as transformers writes it."""
    weight_map = {tensor.name: plan.name for plan in plans for tensor in plan.tensors}
    total = {
        "total_parameters": sum(prod(t.shape) for p in plans for t in p.tensors),
        "total_size": sum(t.size for p in plans for t in p.tensors),
    }
    content = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
