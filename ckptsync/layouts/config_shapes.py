"""Derive the names and shapes of a model's tensors from its ``config.json``.

A table (`_CLASSES`) describes decoders whose tensors follow from a few numbers and flags.
`expected` returns what is certain, with ``None`` for a size that the configuration leaves to a
default; `shapes` returns all tensors or none, for a proof. Nothing follows from other classes, nor
from quantised models, whose matrices have other names.

Source: ``transformers/models/<model_type>/modeling_<model_type>.py`` and ``conversion_mapping.py``,
5.24; tests compare it with what transformers made of configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.plain_json import parse
from ckptsync.tensors import Shape

HEAD = "lm_head.weight"
MOST_LAYERS = 10_000
MOST_TENSORS = 1 << 18  # a model of more implies nothing: a few numbers must not take all memory
_MOST = 1 << 40
_ALWAYS = "+"
_IS_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")

Sizes = tuple[int | None, ...]
"""A shape, with None where nothing says the size of an axis."""
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expected:
    """The tensors that follow from a configuration, by name.

    ``head``, ``embedding``: two of them, which may be one tensor under either name if the
    configuration ties them. ``is_exact``: nothing was left to a default, and there are no other
    tensors.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=dict)
    head: str = ""
    embedding: str = ""
    is_exact: bool = False


def _of_no_layer(config: Config, n: int) -> bool | None:
    """Return False: no layer has experts."""
    del config, n
    return False


def _of_every_layer(config: Config, n: int) -> bool | None:
    """Return True: every layer has experts."""
    del config, n
    return True


def _of_every_nth_layer(config: Config, n: int) -> bool | None:
    """Return whether layer ``n`` of Qwen's has experts; None if the configuration does not say.

    Every ``decoder_sparse_step``th layer does, except ``mlp_only_layers``.
    """
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if type(step) is not int or step < 1 or not isinstance(dense, list):
        return None
    return n not in dense and (n + 1) % step == 0


def _of_later_layers(config: Config, n: int) -> bool | None:
    """Return whether layer ``n`` of DeepSeek's has experts; None if the configuration does not say.

    All layers after the first ``first_k_dense_replace`` do.
    """
    first, step = config.get("first_k_dense_replace"), config.get("moe_layer_freq", 1)
    return n >= first if type(first) is int and step == 1 else None


@dataclass(frozen=True, slots=True)
class _Decoder:
    """The tensors of a class, in rows of text.

    A row is a module, the sizes of its weight, its bias, a condition. A size is a sum of products
    of the letters of `_NUMBERS`. A bias exists always (``+``), or if the flag of that name in the
    configuration is set; the condition is ``?flag`` or ``!flag``. A name after ``=`` is a parameter
    itself, without ``.weight``; ``#`` stands for each expert.

    ``dense``, ``sparse``: the rows of layers without and with experts, as ``has_experts`` decides;
    ``fused`` replaces ``sparse`` if the experts of a layer are one tensor, as transformers 5 has
    them in memory.
    """

    layer: str
    top: str = "embed_tokens V,H\nnorm H"
    dense: str = ""
    sparse: str = ""
    fused: str = ""
    has_experts: Callable[[Config, int], bool | None] = _of_no_layer
    prefix: str = "model."
    layers: str = "layers"
    head: str = f"{HEAD.removesuffix('.weight')} V,H"
    stored_head: str = ""  # its name in files, where that is another
    shares_hidden: bool = True  # head_dim is, by default, the hidden size by the number of heads
    is_transposed: bool = False  # weights are stored the other way round: GPT-2's


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "V": ("vocab_size",),
    "H": ("hidden_size", "n_embd"),
    "I": ("n_inner", "ffn_dim", "intermediate_size"),
    "L": ("num_hidden_layers", "n_layer"),
    "A": ("num_attention_heads", "n_head"),
    "G": ("num_key_value_heads",),
    "D": ("head_dim",),
    "E": ("num_local_experts", "num_experts", "n_routed_experts"),
    "M": ("moe_intermediate_size",),
    "S": ("n_shared_experts",),
    "T": ("shared_expert_intermediate_size",),
    "P": ("max_position_embeddings", "n_positions"),
    "Q": ("q_lora_rank",),
    "K": ("kv_lora_rank",),
    "N": ("qk_nope_head_dim",),
    "R": ("qk_rope_head_dim",),
    "W": ("v_head_dim",),
    "Z": ("word_embed_proj_dim",),
}
_SIZES_OR_NONE = ("q_lora_rank", "n_shared_experts")  # None: the model does without
_BIAS = "attention_bias"


def _attention(qkv: str = "", out: str = "", name: str = "o_proj") -> str:
    """Return the rows of attention: biases ``qkv`` and ``out``, and the output's ``name``."""
    return f"""
        self_attn.q_proj A*D,H {qkv}
        self_attn.k_proj G*D,H {qkv}
        self_attn.v_proj G*D,H {qkv}
        self_attn.{name} H,A*D {out}
    """


def _gated(size: str = "I", bias: str = "", module: str = "mlp") -> str:
    """Return the rows of a gated MLP of that inner size."""
    return f"""
        {module}.gate_proj {size},H {bias}
        {module}.up_proj {size},H {bias}
        {module}.down_proj H,{size} {bias}
    """


def _linear(up: str, down: str, bias: str = "") -> str:
    """Return the rows of an MLP of two layers."""
    return f"mlp.{up} I,H {bias}\nmlp.{down} H,I {bias}\n"


def _norms(*names: str, bias: str = "") -> str:
    """Return a row for each name of a norm, whose size is the hidden size ``H``."""
    return "".join(f"\n{name} H {bias}" for name in names)


def _fused(size: str) -> str:
    """Return the rows of experts that are one tensor."""
    return f"=mlp.experts.gate_up_proj E,2*{size},H\n=mlp.experts.down_proj E,H,{size}\n"


_TWO = _norms("input_layernorm", "post_attention_layernorm")
_TWO_WITH_BIAS = _norms("input_layernorm", "post_attention_layernorm", bias=_ALWAYS)
_AFTER = _norms("post_attention_layernorm", "post_feedforward_layernorm")
_FOUR = _TWO + _norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEAD_NORMS = "\nself_attn.q_norm D\nself_attn.k_norm D\n"
_WIDE_NORMS = "\nself_attn.q_norm A*D\nself_attn.k_norm G*D\n"
_WITH_BIAS = f"embed_tokens V,H\nnorm H {_ALWAYS}"
_LLAMA = _Decoder(_attention(_BIAS, _BIAS) + _gated(bias="mlp_bias") + _TWO)
_PLAIN = _Decoder(_attention() + _gated() + _TWO)
_GEMMA = _attention(_BIAS, _BIAS) + _gated()
_OLMO = _Decoder(_attention(_BIAS, _BIAS) + _gated() + _WIDE_NORMS + _AFTER)
_COHERE = _attention(_BIAS, _BIAS) + _gated() + _norms("input_layernorm")
_GLM = _attention(_BIAS) + "mlp.gate_up_proj 2*I,H\nmlp.down_proj H,I" + _TWO
_BLOOM = f"""
    self_attention.query_key_value 3*H,H {_ALWAYS}
    self_attention.dense H,H {_ALWAYS}
    mlp.dense_h_to_4h 4*H,H {_ALWAYS}
    mlp.dense_4h_to_h H,4*H {_ALWAYS}
"""
_NEOX = f"""
    attention.query_key_value 3*H,H {_BIAS}
    attention.dense H,H {_BIAS}
    mlp.dense_h_to_4h I,H {_ALWAYS}
    mlp.dense_4h_to_h H,I {_ALWAYS}
"""
_GPT2 = f"""
    ln_1 H {_ALWAYS}
    ln_2 H {_ALWAYS}
    attn.c_attn H,3*H {_ALWAYS}
    attn.c_proj H,H {_ALWAYS}
    mlp.c_fc H,I {_ALWAYS}
    mlp.c_proj I,H {_ALWAYS}
"""
_OPT = f"""
    {_attention("enable_bias", "enable_bias", "out_proj").replace("G", "A")}
    fc1 I,H enable_bias
    fc2 H,I enable_bias
    self_attn_layer_norm H {_ALWAYS} ?layer_norm_elementwise_affine
    final_layer_norm H {_ALWAYS} ?layer_norm_elementwise_affine
"""
_LATENT = f"""
    self_attn.q_proj A*N+A*R,H "" !q_lora_rank
    self_attn.q_a_proj Q,H {_BIAS} ?q_lora_rank
    self_attn.q_a_layernorm Q "" ?q_lora_rank
    self_attn.q_b_proj A*N+A*R,Q "" ?q_lora_rank
    self_attn.kv_a_proj_with_mqa K+R,H {_BIAS}
    self_attn.kv_a_layernorm K
    self_attn.kv_b_proj A*N+A*W,K
    self_attn.o_proj H,A*W {_BIAS}
"""
_SHARED = _gated("S*M", "?n_shared_experts", "mlp.shared_experts")
_SHARED_BY_GATE = _gated("T", module="mlp.shared_expert") + "mlp.shared_expert_gate 1,H"
_GATE = "mlp.gate E,H\n"
_GPT_OSS = f"""
    =self_attn.sinks A
    mlp.router E,H {_ALWAYS}
    =mlp.experts.gate_up_proj E,H,2*I
    =mlp.experts.gate_up_proj_bias E,2*I
    =mlp.experts.down_proj E,I,H
    =mlp.experts.down_proj_bias E,H
"""
_MIXTRAL = """
    block_sparse_moe.gate E,H
    block_sparse_moe.experts.#.w1 I,H
    block_sparse_moe.experts.#.w2 H,I
    block_sparse_moe.experts.#.w3 I,H
"""
_CORRECTION = "=mlp.gate.e_score_correction_bias E\n"


def _mixture(
    layer: str,
    has_experts: Callable[[Config, int], bool | None],
    size: str = "M",
    more: str = "",
    dense: str = _gated(),
) -> _Decoder:
    """Return a class of which some or all layers have experts.

    ``size`` is the inner size of an expert, ``more``: further rows of layers with experts.
    """
    more = _GATE + more
    sparse = _gated(size, module="mlp.experts.#") + more
    fused = _fused(size) + more
    return _Decoder(layer, dense=dense, sparse=sparse, fused=fused, has_experts=has_experts)


_CLASSES: Mapping[str, _Decoder] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _PLAIN,
    "MinistralForCausalLM": _PLAIN,
    "Ministral3ForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _Decoder(_attention(_ALWAYS) + _gated() + _TWO),
    "Qwen3ForCausalLM": _Decoder(
        _attention(_BIAS, _BIAS) + _gated() + _HEAD_NORMS + _TWO, shares_hidden=False
    ),
    "GemmaForCausalLM": _Decoder(_GEMMA + _TWO, shares_hidden=False),
    "Gemma2ForCausalLM": _Decoder(_GEMMA + _FOUR, shares_hidden=False),
    "Gemma3ForCausalLM": _Decoder(_GEMMA + _FOUR + _HEAD_NORMS, shares_hidden=False),
    "GraniteForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "SeedOssForCausalLM": _Decoder(
        _attention(_BIAS, "attention_out_bias") + _gated(bias="mlp_bias") + _TWO,
        shares_hidden=False,
    ),
    "Ernie4_5ForCausalLM": _Decoder(
        _attention("use_bias", "use_bias") + _gated(bias="use_bias") + _TWO, shares_hidden=False
    ),
    "HunYuanDenseV1ForCausalLM": _Decoder(
        _attention(_BIAS, _BIAS)
        + _gated()
        + "self_attn.query_layernorm D\nself_attn.key_layernorm D\n"
        + _TWO,
    ),
    "Exaone4ForCausalLM": _Decoder(_attention() + _gated() + _HEAD_NORMS + _AFTER),
    "OlmoForCausalLM": _Decoder(_attention(_BIAS, _BIAS) + _gated(), top="embed_tokens V,H"),
    "Olmo2ForCausalLM": _OLMO,
    "Olmo3ForCausalLM": _OLMO,
    "CohereForCausalLM": _Decoder(
        _COHERE + "\n=self_attn.q_norm.weight A,D '' ?use_qk_norm"
        "\n=self_attn.k_norm.weight G,D '' ?use_qk_norm"
    ),
    "Cohere2ForCausalLM": _Decoder(_COHERE, shares_hidden=False),
    "GlmForCausalLM": _Decoder(_GLM, shares_hidden=False),
    "Glm4ForCausalLM": _Decoder(
        _GLM + _norms("post_self_attn_layernorm", "post_mlp_layernorm"), shares_hidden=False
    ),
    "PhiForCausalLM": _Decoder(
        _attention(_ALWAYS, _ALWAYS, "dense")
        + _linear("fc1", "fc2", _ALWAYS)
        + _norms("input_layernorm", bias=_ALWAYS)
        + f"\nself_attn.q_layernorm D {_ALWAYS} ?qk_layernorm"
        + f"\nself_attn.k_layernorm D {_ALWAYS} ?qk_layernorm",
        top=f"embed_tokens V,H\nfinal_layernorm H {_ALWAYS}",
        head=f"lm_head V,H {_ALWAYS}",
    ),
    "Phi3ForCausalLM": _Decoder(
        "self_attn.qkv_proj A*D+2*G*D,H\nself_attn.o_proj H,A*D"
        "\nmlp.gate_up_proj 2*I,H\nmlp.down_proj H,I" + _TWO
    ),
    "Starcoder2ForCausalLM": _Decoder(
        _attention("use_bias", "use_bias") + _linear("c_fc", "c_proj", "use_bias") + _TWO_WITH_BIAS,
        top=_WITH_BIAS,
    ),
    "StableLmForCausalLM": _Decoder(
        _attention("use_qkv_bias")
        + _gated()
        + _norms("input_layernorm", bias=_ALWAYS)
        + f"\npost_attention_layernorm H {_ALWAYS} !use_parallel_residual",
        top=_WITH_BIAS,
    ),
    "GPT2LMHeadModel": _Decoder(
        _GPT2,
        f"wte V,H\nwpe P,H\nln_f H {_ALWAYS}",
        prefix="transformer.",
        layers="h",
        is_transposed=True,
    ),
    "GPTNeoXForCausalLM": _Decoder(
        _NEOX + _TWO_WITH_BIAS,
        f"embed_in V,H\nfinal_layer_norm H {_ALWAYS}",
        prefix="gpt_neox.",
        stored_head="embed_out.weight",
    ),
    "BloomForCausalLM": _Decoder(
        _BLOOM + _TWO_WITH_BIAS,
        "word_embeddings V,H" + _norms("word_embeddings_layernorm", "ln_f", bias=_ALWAYS),
        prefix="transformer.",
        layers="h",
    ),
    "OPTForCausalLM": _Decoder(
        _OPT,
        f"""
        embed_tokens V,Z
        embed_positions P+2,H
        final_layer_norm H {_ALWAYS} ?do_layer_norm_before
        """,
        prefix="model.decoder.",
        head="lm_head V,Z",
    ),
    "MixtralForCausalLM": _Decoder(
        _attention() + _TWO,
        sparse=_MIXTRAL,
        fused=_fused("I") + _GATE,
        has_experts=_of_every_layer,
    ),
    "Qwen2MoeForCausalLM": _mixture(
        _attention("qkv_bias") + _TWO, _of_every_nth_layer, more=_SHARED_BY_GATE
    ),
    "Qwen3MoeForCausalLM": _mixture(
        _attention(_BIAS, _BIAS) + _HEAD_NORMS + _TWO, _of_every_nth_layer
    ),
    "OlmoeForCausalLM": _mixture(
        _attention(_BIAS, _BIAS) + _WIDE_NORMS + _TWO, _of_every_layer, "I"
    ),
    "Glm4MoeForCausalLM": _mixture(
        _attention(_BIAS)
        + _TWO
        + "\nself_attn.q_norm D '' ?use_qk_norm\nself_attn.k_norm D '' ?use_qk_norm",
        _of_later_layers,
        more=_CORRECTION + _SHARED,
    ),
    "DeepseekV2ForCausalLM": _mixture(
        _LATENT + _TWO, _of_later_layers, more=_SHARED, dense=_gated(bias="mlp_bias")
    ),
    "DeepseekV3ForCausalLM": _mixture(_LATENT + _TWO, _of_later_layers, more=_CORRECTION + _SHARED),
    "GptOssForCausalLM": _Decoder(_attention(_BIAS, _BIAS) + _GPT_OSS + _TWO, shares_hidden=False),
}
# The classes whose text model, in ``text_config``, is that of another.
_TEXT_OF: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}


def parsed(name: str, data: bytes) -> Config:
    """Return the configuration in the JSON ``data``; raise Corrupt if it is no JSON object."""
    config = parse(data, name, "a configuration")
    if not isinstance(config, dict):
        raise Corrupt(f"{name}: not a configuration: it is no object")
    return config


def ties(config: Config) -> bool:
    """Return whether ``tie_word_embeddings`` is true; then either name or both may be stored."""
    return config.get("tie_word_embeddings") is True


def shapes(config: Config, names: Collection[str] = ()) -> dict[str, Shape]:
    """Return every tensor of the model, its head too if tied; empty unless all follow for certain.

    ``names``: the tensors of the checkpoint, which show whether it keeps experts as one tensor.
    """
    model = expected(config, names)
    return {
        name: tuple(n or 0 for n in sizes) for name, sizes in model.sizes.items() if model.is_exact
    }


def expected(config: Config, names: Collection[str] = ()) -> Expected:
    """Return the tensors that follow from a configuration; an empty `Expected` if none do.

    So it is for an unknown class, several, quantised weights, and as `_Reader.expected`. Of a class
    with a text model only that model's tensors follow, never exactly. ``names``: as for `shapes`.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        return Expected()
    decoder, nested = _CLASSES.get(classes[0]), False
    if decoder is None and (decoder := _CLASSES.get(_TEXT_OF.get(classes[0], ""))):
        text = config.get("text_config")
        nested, config = True, {**config, **text} if isinstance(text, dict) else config
    if decoder is None or config.get("quantization_config"):
        return Expected()
    model = _Reader(config, decoder, any(map(_IS_FUSED.search, names)))
    implied = model.expected(names)
    return Expected(implied.sizes, implied.head, implied.embedding, implied.is_exact and not nested)


class _Reader:
    """Reads the rows of a class with the numbers of one configuration.

    ``_is_exact`` becomes False, for good, at the first value that is not known.
    """

    def __init__(self, config: Config, decoder: _Decoder, is_fused: bool) -> None:  # noqa: FBT001
        self._config, self._decoder, self._is_fused = config, decoder, is_fused
        self._is_exact = True
        self._numbers = {letter: self._number(keys) for letter, keys in _NUMBERS.items()}
        hidden, heads = self._numbers["H"], self._numbers["A"]
        if self._numbers["D"] is None and decoder.shares_hidden and hidden and heads:
            self._numbers["D"] = hidden // heads if hidden % heads == 0 else None
        self._is_exact &= self._numbers["Z"] in (None, hidden)  # else OPT projects in and out
        if decoder.is_transposed and "n_inner" in config and config["n_inner"] is None:
            self._numbers["I"] = hidden and 4 * hidden

    def expected(self, names: Collection[str]) -> Expected:
        """Return the tensors; none if there may be too many, or a number is unknown that decides.

        That is the number of layers, that of experts, or which layers have them. ``names``: of the
        checkpoint's tensors; the head has its ``stored_head`` name if that is among them.
        """
        decoder, count = self._decoder, self._numbers["L"]
        if count is None or count > MOST_LAYERS:
            return Expected()
        if decoder.has_experts is not _of_no_layer and self._numbers["E"] is None:
            return Expected()
        sizes_by_name = dict(self._rows(decoder.top, decoder.prefix))
        embedding = next(iter(sizes_by_name))
        layers = [dict(self._rows(decoder.layer + "\n" + decoder.dense, ""))]
        if decoder.has_experts is not _of_no_layer:
            rows = decoder.fused if self._is_fused else decoder.sparse
            layers.append(dict(self._rows(f"{decoder.layer}\n{rows}", "")))
        if count * max(map(len, layers)) > MOST_TENSORS:
            return Expected()
        for n in range(count):
            has_experts = decoder.has_experts(self._config, n)
            if has_experts is None:
                return Expected()
            place = f"{decoder.prefix}{decoder.layers}.{n}."
            sizes_by_name.update(
                {place + name: sizes for name, sizes in layers[has_experts].items()}
            )
        head_sizes = dict(self._rows(decoder.head, ""))
        head = next(iter(head_sizes))
        if decoder.stored_head in names:
            head_sizes = {decoder.stored_head: head_sizes[head]}
            head = decoder.stored_head
        sizes_by_name |= head_sizes
        is_exact = self._is_exact and not any(None in sizes for sizes in sizes_by_name.values())
        return Expected(sizes_by_name, head, embedding, is_exact)

    def _number(self, keys: tuple[str, ...]) -> int | None:
        """Return the value of the first of ``keys`` in the configuration.

        None without one, or if that is no integer from 1 to below `_MOST`; later keys do not count.
        """
        value = next((self._config[key] for key in keys if key in self._config), None)
        return value if type(value) is int and 0 < value < _MOST else None

    def _flag(self, name: str) -> bool:
        """Return whether a flag is True, or one of `_SIZES_OR_NONE` is neither missing nor None.

        The result is no longer exact if another flag is no boolean.
        """
        value = self._config.get(name)
        if name in _SIZES_OR_NONE:
            return value is not None
        if not isinstance(value, bool):
            self._is_exact = False
        return value is True

    def _rows(self, text: str, prefix: str) -> Iterator[tuple[str, Sizes]]:
        """Yield name, which ``prefix`` begins, and sizes of each tensor of the rows of ``text``.

        Rows whose condition does not hold are left out; so are experts of an unknown or too large
        number, and the result is no longer exact.
        """
        for name, axes, bias, condition in _parse(text):
            if condition and not self._holds(condition):
                continue
            sizes = tuple(map(self._size, axes))
            count = self._numbers["E"] if "#" in name else 1
            if count is None or count > MOST_LAYERS:
                self._is_exact = False
                continue
            has_bias = bias == _ALWAYS or (bool(bias) and self._flag(bias))
            for n in range(count):
                full_name = prefix + name.replace("#", str(n))
                if name.startswith("="):
                    yield full_name.replace("=", "", 1), sizes
                    continue
                yield f"{full_name}.weight", sizes
                if has_bias:
                    yield (
                        f"{full_name}.bias",
                        sizes[-1:] if self._decoder.is_transposed else sizes[:1],
                    )

    def _holds(self, condition: str) -> bool:
        """Return whether the condition of a row holds: ``?flag`` or ``!flag``.

        False if the flag is not in the configuration, or no boolean: the result is not exact then.
        """
        name = condition[1:]
        is_set = self._flag(name)
        is_known = name in self._config and (
            name in _SIZES_OR_NONE or isinstance(self._config[name], bool)
        )
        self._is_exact &= is_known
        return is_known and is_set == condition.startswith("?")

    def _size(self, axis: str) -> int | None:
        """Return the size of an axis, a sum of products; None if a number is unknown."""
        total = 0
        for term in axis.split("+"):
            factors = [int(f) if f.isdigit() else self._numbers[f] for f in term.split("*")]
            numbers = [f for f in factors if f is not None]
            if len(numbers) < len(factors):
                return None
            total += prod(numbers)
        return total


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[tuple[str, tuple[str, ...], str, str], ...]:
    """Return the rows of a text: name, sizes, bias and condition, the last two "" without them."""
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, axes, *words = line.split()
        bias = next((w for w in words if w[0] not in "?!\"'"), "")
        condition = next((w for w in words if w[0] in "?!"), "")
        rows.append((name, tuple(axes.split(",")), bias, condition))
    return tuple(rows)
