"""What stands beside the weights: the index, the configuration, the tokenizer.  Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from math import prod

from ckptsync.formats.dtypes import FROM_TORCH, PRECISION, is_castable
from ckptsync.merge.plan import DType, FilePlan

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
_CODE = re.compile(r"(configuration|modeling|tokenization|processing|image_processing)_\w+\.py")

_CONFIGS = ("config.json", "adapter_config.json")
_TORCH = {ours: torchs for torchs, ours in FROM_TORCH.items()}


def is_beside(name: str) -> bool:
    """Whether a file at the top of a checkpoint belongs to the model rather than to its training."""
    return name in NAMES or bool(_CODE.fullmatch(name))


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
    found = {t.dtype for p in plans for t in p.tensors if is_castable(t.dtype)}
    if not found or (len(found) > 1 and asked == "auto"):
        return None
    return _TORCH[max(found, key=PRECISION.__getitem__)]


def with_dtype(config: bytes, dtype: str | None) -> bytes:
    """``config.json`` naming ``dtype`` where it names one; a file that names none, or cannot be read, is left as it is."""
    try:
        content = json.loads(config)
    except (ValueError, RecursionError):
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
