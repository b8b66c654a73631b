"""Names and shapes of all tensors that a ``config.json`` implies.

Only for the plain decoders whose shapes follow from a few numbers.

Source: ``transformers/models/<model_type>/modeling_<model_type>.py``, 5.23; the tests hold shapes
that transformers itself made. Whatever it does not say exactly implies nothing: another class, a
quantised model, a number that is left to a default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.plain_json import parse
from ckptsync.tensors import Shape

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOST_LAYERS = 10_000
ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class _DecoderKind:
    """What tells one class from another.

    A bias is there `ALWAYS`, where the configuration's flag of that name says so, or never.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: tuple[str, ...] = ()
    qkv_bias: str = ""
    out_bias: str = ""
    mlp_bias: str = ""


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_WITHOUT_HEAD_DIM = ("llama", "mistral", "qwen2", "granite", "smollm3")
_FLAG = "attention_bias"
_FOUR = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_HEADS = ("q_norm", "k_norm")
_LLAMA = _DecoderKind(qkv_bias=_FLAG, out_bias=_FLAG, mlp_bias="mlp_bias")
_CLASSES: Mapping[str, _DecoderKind] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _DecoderKind(),
    "Qwen2ForCausalLM": _DecoderKind(qkv_bias=ALWAYS),
    "Qwen3ForCausalLM": _DecoderKind(head_norms=_HEADS, qkv_bias=_FLAG, out_bias=_FLAG),
    "GemmaForCausalLM": _DecoderKind(qkv_bias=_FLAG, out_bias=_FLAG),
    "Gemma2ForCausalLM": _DecoderKind(norms=_FOUR, qkv_bias=_FLAG, out_bias=_FLAG),
    "Gemma3ForCausalLM": _DecoderKind(
        norms=_FOUR, head_norms=_HEADS, qkv_bias=_FLAG, out_bias=_FLAG
    ),
    "GraniteForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
}


def parsed(name: str, data: bytes) -> Mapping[str, Any]:
    """Return a configuration; raises Corrupt if it is none."""
    config = parse(data, name, "a configuration")
    if not isinstance(config, dict):
        raise Corrupt(f"{name}: not a configuration: it is no object")
    return config


def ties(config: Mapping[str, Any]) -> bool:
    """Return whether the output layer is the embedding, stored under either name or both."""
    return config.get("tie_word_embeddings") is True


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return every tensor of the model, `HEAD` too where tied; empty if it is not implied."""
    kind, sizes = _kind(config), _sizes(config)
    if kind is None or sizes is None or config.get("quantization_config"):
        return {}
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    found: dict[str, Shape] = {
        EMBEDDING: (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        HEAD: (vocabulary, hidden),
    }
    biases = {flag for flag in _flags(kind) if flag == ALWAYS or config[flag]}
    layer = dict(_layer(kind, sizes, biases))
    return found | {
        f"model.layers.{n}.{name}": shape
        for n in range(sizes["num_hidden_layers"])
        for name, shape in layer.items()
    }


def _kind(config: Mapping[str, Any]) -> _DecoderKind | None:
    """Return the class, if it is known and all of its flags are given."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        return None
    kind = _CLASSES.get(classes[0])
    flags = _flags(kind) - {ALWAYS} if kind else ()
    return kind if all(isinstance(config.get(flag), bool) for flag in flags) else None


def _flags(kind: _DecoderKind) -> set[str]:
    return {kind.qkv_bias, kind.out_bias, kind.mlp_bias} - {""}


def _sizes(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the numbers that decide everything, if all are given, or head_dim follows."""
    sizes = {name: config.get(name) for name in _SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if (
        sizes["head_dim"] is None
        and config.get("model_type") in _WITHOUT_HEAD_DIM
        and type(hidden) is type(heads) is int
        and heads
    ):
        sizes["head_dim"] = hidden // heads if hidden % heads == 0 else None
    found = {name: n for name, n in sizes.items() if type(n) is int and 0 < n < 1 << 40}
    is_known = len(found) == len(_SIZES) and found["num_hidden_layers"] <= MOST_LAYERS
    return found if is_known else None


def _layer(
    kind: _DecoderKind, sizes: Mapping[str, int], biases: Collection[str]
) -> Iterator[tuple[str, Shape]]:
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, key = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": ((query, hidden), kind.qkv_bias),
        "self_attn.k_proj": ((key, hidden), kind.qkv_bias),
        "self_attn.v_proj": ((key, hidden), kind.qkv_bias),
        "self_attn.o_proj": ((hidden, query), kind.out_bias),
        "mlp.gate_proj": ((inner, hidden), kind.mlp_bias),
        "mlp.up_proj": ((inner, hidden), kind.mlp_bias),
        "mlp.down_proj": ((hidden, inner), kind.mlp_bias),
    }
    for name, (shape, bias) in linears.items():
        yield f"{name}.weight", shape
        if bias in biases:
            yield f"{name}.bias", shape[:1]
    yield from ((f"{name}.weight", (hidden,)) for name in kind.norms)
    yield from ((f"self_attn.{name}.weight", (head,)) for name in kind.head_norms)
