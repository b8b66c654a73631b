"""The model that the generated checkpoints hold: names and shapes as a small Llama has them, as
many layers as a size needs.
"""

from __future__ import annotations

from math import prod

HIDDEN, INNER, HEADS, KEY_VALUE_HEADS, VOCABULARY = 1024, 2816, 16, 4, 16003
RANKS = 4

Shapes = dict[str, tuple[int, ...]]


def layers(gib: float) -> int:
    """How many layers make ``gib`` GiB of float32 weights, at least one."""
    return max(1, round((gib * 2**30 / 4 - numel(_ends())) / numel(_layer(0))))


def model(gib: float) -> Shapes:
    """Name → shape."""
    found: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for n in range(layers(gib)):
        found |= _layer(n)
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def small(count: int) -> Shapes:
    """``count`` tensors of 256 bytes."""
    return {f"model.layers.{n // 100}.experts.{n % 100}.scale": (64,) for n in range(count)}


def numel(shapes: Shapes) -> int:
    """Elements of all."""
    return sum(map(prod, shapes.values()))


def config(gib: float) -> dict[str, object]:
    """What ``config.json`` says of it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers(gib),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }


def _ends() -> Shapes:
    return {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,), "head": (VOCABULARY, HIDDEN)}


def _layer(n: int) -> Shapes:
    narrow = HIDDEN // HEADS * KEY_VALUE_HEADS
    shapes = {
        "input_layernorm": (HIDDEN,),
        "mlp.down_proj": (HIDDEN, INNER),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.k_proj": (narrow, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.v_proj": (narrow, HIDDEN),
    }
    return {f"model.layers.{n}.{name}.weight": shape for name, shape in shapes.items()}
