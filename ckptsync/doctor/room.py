"""How much a checkpoint takes: of one that is there, or of a model that is to be trained.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Bytes that a training state takes for each parameter: weights in bfloat16, and in float32 the master weights and Adam's two moments (ZeRO, arXiv 1910.02054, 3.1)
WEIGHT, STATES = 2, 12


def full_training(config: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint with all states, by a model's config.json; 0 where it does not say enough."""
    return parameters(config) * (WEIGHT + STATES)


def parameters(config: Mapping[str, Any]) -> int:
    """Of a decoder as most are built (grouped attention, gated MLP, experts), without norms and biases; 0 where the configuration is of another kind."""
    config = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    hidden, layers, vocabulary = (_number(config, key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, inner = _number(config, "num_attention_heads"), _number(config, "intermediate_size")
    if not (hidden and layers and vocabulary and heads and inner):
        return 0
    width = _number(config, "head_dim") or hidden // heads
    groups = _number(config, "num_key_value_heads") or heads
    attention = 2 * hidden * heads * width + 2 * hidden * groups * width
    experts = _number(config, "num_local_experts") or _number(config, "num_experts") or _number(config, "n_routed_experts") or 1
    each = _number(config, "moe_intermediate_size") or inner
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") is True else 2)
    return embeddings + layers * (attention + 3 * hidden * each * experts)


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else 0
