"""What stands beside the weights: the index, the configuration, the tokenizer.  Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from math import prod

from ckptsync.formats.dtypes import FROM_TORCH
from ckptsync.merge.cast import PRECISION, is_castable
from ckptsync.merge.plan import FilePlan

# What `from_pretrained` and inference servers read beside the weights, and nothing of a training's state.
_BESIDE = re.compile(
    r"(config|generation_config|adapter_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|processor_config|video_preprocessor_config|image_processor_config|chat_template|feature_extractor_config|quantization_config)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model|tekken\.json"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)

_TORCH = {ours: torchs for torchs, ours in FROM_TORCH.items()}


def is_beside(name: str) -> bool:
    """Whether a file at the top of a checkpoint belongs to the model rather than to its training."""
    return bool(_BESIDE.fullmatch(name))


def beside(names: Iterable[str], *, adapter: bool) -> tuple[str, ...]:
    """The files to copy; an adapter has no ``config.json`` of its own, a model no ``adapter_config.json``."""
    other = "config.json" if adapter else "adapter_config.json"
    return tuple(sorted(name for name in names if is_beside(name) and name != other))


def with_dtype(config: bytes, plans: Sequence[FilePlan]) -> bytes:
    """``config.json`` with the element type of what was written, since `from_pretrained` casts to what it says there.

    The most precise floating type among the tensors; a file that names none, or cannot be read, is left as it is.
    """
    found = {t.dtype for p in plans for t in p.tensors if is_castable(t.dtype)}
    try:
        content = json.loads(config)
    except (ValueError, RecursionError):
        return config  # it is copied as it is; what it means is for its reader to say
    if not found or not isinstance(content, dict):
        return config
    dtype = _TORCH[max(found, key=PRECISION.__getitem__)]
    changed = {key: dtype for key in ("dtype", "torch_dtype") if isinstance(content.get(key), str) and content[key] != dtype}
    return (json.dumps(content | changed, indent=2, ensure_ascii=False) + "\n").encode() if changed else config


def index(plans: Sequence[FilePlan]) -> bytes:
    """``model.safetensors.index.json`` as transformers writes it."""
    weight_map = {tensor.name: plan.name for plan in plans for tensor in plan.tensors}
    total = {
        "total_parameters": sum(prod(t.shape) for p in plans for t in p.tensors),
        "total_size": sum(t.size for p in plans for t in p.tensors),
    }
    content = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
