"""What an adapter changes in its base: peft's own sums, and every reason to refuse one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.merger import adapter_sums, read_units
from ckptsync.merger.adapter_changes import plan_changes
from ckptsync.merger.change_types import Changes, LowRank
from ckptsync.tensors import Tensor
from tests.support.whole_numbers import SUMS, digest, sum_into_base, tensor, tensors, value

P = "base_model.model."
LAYER = "model.layers.0."
Q = f"{LAYER}self_attn.q_proj"
SHAPES = {
    "model.embed_tokens.weight": (12, 4),
    f"{Q}.weight": (6, 4),
    f"{LAYER}mlp.down_proj.weight": (4, 10),
    "lm_head.weight": (12, 4),
}


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's two factors, by their names."""
    return {f"{P}{module}.lora_A.weight": a, f"{P}{module}.lora_B.weight": b}


PAIR = pair(Q, (2, 4), (6, 2))
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "peft_version": "0.21.2"}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 12}
TIED = {**LLAMA, "tie_word_embeddings": True}
QWEN = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
TIED_SHAPES = {n: shape for n, shape in SHAPES.items() if n != "lm_head.weight"}
WORDS = {
    f"{P}model.embed_tokens.lora_embedding_A": (2, 12),
    f"{P}model.embed_tokens.lora_embedding_B": (4, 2),
    f"{P}lm_head.lora_A.weight": (2, 4),
    f"{P}lm_head.lora_B.weight": (12, 2),
}


def plan(
    base: Mapping[str, Iterable[int]] = SHAPES,
    adapter: Mapping[str, Iterable[int]] = PAIR,
    config: Mapping[str, Any] = LLAMA,
    *,
    dtype: str = "F32",
    adapter_dtype: str = "F32",
    is_changed_base: bool = False,
    is_equal: bool | None = None,
    **own: Any,
) -> Changes:
    def equal(one: Tensor, other: Tensor, is_crossed: bool) -> bool:  # noqa: FBT001
        assert one.shape == (other.shape[::-1] if is_crossed else other.shape)
        return bool(is_equal)

    return plan_changes(
        tensors(base, dtype),
        config,
        tensors(adapter, adapter_dtype),
        {**LORA, **own},
        is_changed_base=is_changed_base,
        is_equal=None if is_equal is None else equal,
    )


@pytest.mark.parametrize("name", sorted(SUMS))
def test_a_sum_is_pefts_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = SUMS[name]
    monkeypatch.setattr(read_units, "WINDOW", 200)
    monkeypatch.setattr(adapter_sums, "BLOCK", 7)
    monkeypatch.setattr(adapter_sums, "_WHOLE", 0)
    monkeypatch.setattr(adapter_sums, "_STEPPED", 0)
    ours = sum_into_base(of["base"], of["config"], of["adapter"], of["adapter_config"])
    before = {n: value(n, tuple(shape)) for n, shape in of["base"].items()}
    differ = {
        n: digest(v)
        for n, v in ours.items()
        if n not in before or v.shape != before[n].shape or (v != before[n]).any()
    }
    assert differ == of["changed"]
    assert sorted(before.keys() - ours.keys()) == of["lost"]


def test_what_is_written_in_config_json() -> None:
    def settings(name: str) -> Mapping[str, Any]:
        of = SUMS[name]
        own = tensors(of["base"]), of["config"], tensors(of["adapter"]), of["adapter_config"]
        return plan_changes(*own).config

    assert settings("resized") == settings("resized-tied") == {"vocab_size": 15}
    assert settings("saved-tied-head") == {"tie_word_embeddings": False}
    assert settings("classifier") == {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
        "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    }
    own_class = {"architectures": ["OfMyOwn"]}
    classified = {**PAIR, f"{P}score.weight": (3, 4)}
    result = plan(adapter=classified, config=own_class, task_type="SEQ_CLS")
    assert (result.config, result.removed, len(result.added)) == ({}, frozenset(), 1)
    nested = {"text_config": {"vocab_size": 12}, "vision_config": {"vocab_size": 5}}
    saved = {f"{P}{word}.weight": (15, 4) for word in ("model.embed_tokens", "lm_head")}
    result = plan(adapter={**PAIR, **saved}, config=nested)
    assert result.config == {"text_config": {"vocab_size": 15}}
    assert set(result.shapes.values()) == {(15, 4)}
    tied = {"text_config": {"vocab_size": 12, "tie_word_embeddings": True}}
    assert plan(TIED_SHAPES, {**PAIR, **saved}, tied, is_equal=False).config == {
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": False, "vocab_size": 15},
    }


# Scales


@pytest.mark.parametrize(
    ("own", "scale"),
    [
        ({}, 2.0),
        ({"peft_type": "PeftType.lora"}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 6}}, 3.0),
        ({"alpha_pattern": {"proj": 6}}, 2.0),  # a whole component, or a pattern that matches one
        ({"alpha_pattern": {"self_attn|x": 6}}, 2.0),
        ({"alpha_pattern": {".*_proj": 6}}, 3.0),
        ({"alpha_pattern": {f"^{Q}": 6, "q_proj": 8}}, 3.0),
        ({"r": 1, "rank_pattern": {"q_proj": 2}}, 2.0),
        ({"r": 8, "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2}}, 2.0),
        ({"r": 8, "rank_pattern": {"q_proj": 3, f"{LAYER}.*": 2}}, 2.0),  # the factors tell
    ],
)
def test_the_scale_is_that_of_the_first_pattern(own: dict[str, Any], scale: float) -> None:
    result = plan(**own)
    (change,) = result.of[f"{Q}.weight"]
    assert isinstance(change, LowRank)
    assert change.scale == scale
    patterns = [*own.get("alpha_pattern", ()), *own.get("rank_pattern", ())]
    assert ["2 patterns match" in w for w in result.warnings] == [True] * (len(patterns) > 1)


# Experts


def per_expert(*names: str) -> dict[str, tuple[int, int]]:
    shapes = {names[0]: (3, 4), names[1]: (3, 4), names[2]: (4, 3)}
    return {f"{LAYER}mlp.experts.{e}.{n}.weight": s for e in range(2) for n, s in shapes.items()}


APART = per_expert("gate_proj", "up_proj", "down_proj")
FUSED = {f"{LAYER}mlp.experts.gate_up_proj": (2, 6, 4), f"{LAYER}mlp.experts.down_proj": (2, 4, 3)}
OF_EXPERTS = f"{P}{LAYER}mlp.experts."


def factors_apart() -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    for name, (out, size) in APART.items():
        result |= pair(name.removesuffix(".weight"), (2, size), (out, 2))
    return result


def factors_fused() -> dict[str, tuple[int, ...]]:
    module = f"{LAYER}mlp.experts"
    return pair(f"{module}.base_layer", (4, 4), (6, 4)) | pair(module, (4, 3), (4, 4))


def without(shapes: Mapping[str, tuple[int, ...]], part: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if part not in name}


DOWN_FACTORS = without(factors_fused(), "base_layer")


def delta(
    base: Mapping[str, tuple[int, ...]], adapter: Mapping[str, tuple[int, ...]], **own: Any
) -> dict[str, Any]:
    """Return what is added to each tensor; experts one by one, as files have them."""
    sums = sum_into_base(base, QWEN, adapter, {**LORA, **own})
    added = {n: summed - value(n, summed.shape) for n, summed in sums.items()}
    for name in [n for n in added if n.endswith("experts.gate_up_proj")]:
        for e, matrix in enumerate(added.pop(name)):
            stem = f"{name.removesuffix('gate_up_proj')}{e}."
            added[f"{stem}gate_proj.weight"], added[f"{stem}up_proj.weight"] = np.split(matrix, 2)
    for name in [n for n in added if n.endswith("experts.down_proj")]:
        for e, matrix in enumerate(added.pop(name)):
            added[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = matrix
    return {n: matrix for n, matrix in added.items() if matrix.any()}


@pytest.mark.parametrize("factors", [factors_apart(), factors_fused()], ids=["apart", "fused"])
def test_experts_get_the_same_whether_they_are_one_tensor_or_many(
    factors: dict[str, tuple[int, ...]],
) -> None:
    apart, fused = delta(APART, factors), delta(FUSED, factors)
    assert apart.keys() == fused.keys() == APART.keys()
    for name in APART:
        np.testing.assert_array_equal(apart[name], fused[name])


@pytest.mark.parametrize("version", ["0.18.1", "0.17.0", None])
def test_before_0_19_peft_took_all_experts_as_in_by_out(version: str | None) -> None:
    module = f"{LAYER}mlp.experts"
    old = pair(f"{module}.base_layer", (4, 6), (4, 4)) | pair(module, (4, 4), (3, 4))
    result = delta(APART, old, peft_version=version)
    a, b = (value(n, s) for n, s in list(old.items())[:2])
    for e in range(2):
        product = 2 * (b[:, e::2] @ a[2 * e : 2 * e + 2]).T
        stem = f"{LAYER}mlp.experts.{e}."
        np.testing.assert_array_equal(result[f"{stem}gate_proj.weight"], product[:3])
        np.testing.assert_array_equal(result[f"{stem}up_proj.weight"], product[3:])


@pytest.mark.parametrize(
    ("version", "kind", "is_transposed"),
    [
        ("0.18.1", "qwen2_moe", True),
        ("0.19.0.dev0", "qwen2_moe", False),
        ("0.21.2", "gpt_oss", True),
        ("1.0", "qwen2_moe", False),
    ],
)
def test_of_square_experts_only_peft_and_class_tell_how(
    version: str, kind: str, *, is_transposed: bool
) -> None:
    # a single matrix is added as it is
    for count, shape, expected in ((2, (2, 4, 4), is_transposed), (1, (4, 4), False)):
        square = {f"{LAYER}mlp.experts.gate_up_proj": shape}
        factors = pair(f"{LAYER}mlp.experts", (2 * count, 4), (4, 2 * count))
        result = plan(square, factors, {"model_type": kind}, peft_version=version)
        (own,) = result.of.values()
        assert {c.is_transposed for c in own if isinstance(c, LowRank)} == {expected}


@pytest.mark.parametrize(
    ("kind", "siblings", "is_transposed"),
    [
        ("gpt2", {}, True),
        ("llama", {}, False),
        ("gpt2", {"c_fc": (6, 4), "c_attn": (4, 6)}, True),  # siblings of both kinds
        ("llama", {"c_fc": (6, 4), "c_attn": (4, 6)}, False),
    ],
)
def test_a_square_layer_is_stored_as_its_siblings_or_as_its_class_has_it(
    kind: str, siblings: dict[str, tuple[int, ...]], *, is_transposed: bool
) -> None:
    factors = pair("h.0.c_proj", (2, 4), (4, 2))
    for name in siblings:
        factors |= pair(f"h.0.{name}", (2, 4), (6, 2))
    base = {f"h.0.{n}.weight": s for n, s in {"c_proj": (4, 4), **siblings}.items()}
    (change,) = plan(base, factors, {"model_type": kind}).of["h.0.c_proj.weight"]
    assert isinstance(change, LowRank)
    assert change.is_transposed == is_transposed


def test_a_parameter_that_nothing_names_is_known_by_its_shape_or_refused() -> None:
    assert delta(APART, DOWN_FACTORS).keys() == {n for n in APART if "down" in n}
    like = {f"{LAYER}mlp.experts.gate_proj": (2, 3, 4), f"{LAYER}mlp.experts.up_proj": (2, 3, 4)}
    factors = pair(f"{LAYER}mlp.experts", (4, 4), (3, 4))
    with pytest.raises(Unsupported, match="may be of gate_proj or of up_proj"):
        plan(like, factors, QWEN)
    result = plan(like, factors, QWEN, target_parameters=["experts.up_proj"])
    assert list(result.of) == [f"{LAYER}mlp.experts.up_proj"]
    # of both, the inner pair adapts what the module registers first
    inner = pair(f"{LAYER}mlp.experts.base_layer", (4, 4), (3, 4))
    changes = plan(like, factors | inner, QWEN).of
    assert changes.keys() == like.keys()
    for name, (change, *_) in changes.items():
        assert isinstance(change, LowRank)
        assert ("base_layer" in change.a.tensor.name) == name.endswith("gate_proj")


def test_rows_of_a_tensor_are_taken_only_where_its_bytes_lie_in_their_order() -> None:
    (saved,) = tensors({f"{OF_EXPERTS}down_proj": (2, 4, 3)})
    part = replace(saved.copies[0].parts[0], strides=(12, 1, 4))
    turned = replace(saved, copies=(replace(saved.copies[0], parts=(part,)),))
    with pytest.raises(Unsupported, match="stored in 1 parts, and the base has it in pieces"):
        plan_changes(tensors(APART), QWEN, [turned], LORA)


def test_a_part_of_what_a_file_has_as_one_is_changed_in_its_place() -> None:
    factors = pair(f"{LAYER}self_attn.k_proj", (2, 4), (6, 2))
    base = {f"{LAYER}attention.query_key_value.weight": (18, 4)}
    ((change,),) = plan(base, factors, {"model_type": "sarvam_moe"}).of.values()
    assert isinstance(change, LowRank)
    assert (change.offsets, change.sizes) == ((6, 0), (6, 4))


# Names


@pytest.mark.parametrize(
    ("file", "live", "config"),
    [
        ("h.0.attn.c_attn", "transformer.h.0.attn.c_attn", {"model_type": "gpt2"}),
        ("model.layers.0.q_proj", "layers.0.q_proj", {}),
        ("bert.encoder.layer.0.query", "encoder.layer.0.query", {"model_type": "bert"}),
        ("language_model.model.layers.0.q", "model.language_model.layers.0.q", {}),
        ("model.language_model.layers.0.q", "language_model.model.layers.0.q", {}),
        ("visual.blocks.0.qkv", "model.visual.blocks.0.qkv", {}),
        ("vision_tower.vision_model.layers.0.q", "model.vision_tower.layers.0.q", {}),
        ("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate", {}),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_module_is_found_under_the_name_that_its_file_has(
    file: str, live: str, config: dict[str, Any], *, is_reversed: bool
) -> None:
    base, own = (live, file) if is_reversed else (file, live)
    factors = pair(own, (2, 4), (6, 2))
    shape = (4, 6) if own.endswith("c_attn") else (6, 4)
    assert list(plan({f"{base}.weight": shape}, factors, config).of) == [f"{base}.weight"]


@pytest.mark.parametrize(
    "base",
    [
        ("text_model.layers.0.q", "language_model.layers.0.q"),  # either may be meant
        ("vision_model.layers.0.q",),  # not the text's
    ],
)
def test_a_name_that_may_be_of_another_tower_is_not_found(base: tuple[str, ...]) -> None:
    factors = pair("layers.0.q", (2, 4), (6, 2))
    with pytest.raises(
        Corrupt, match=r"1 modules of the adapter are not in the base: layers\.0\.q"
    ):
        plan({f"{name}.weight": (6, 4) for name in base}, factors, {})


def test_raw_state_dicts_have_the_adapters_name_in_theirs() -> None:
    raw = {n.replace(".weight", ".default.weight"): s for n, s in PAIR.items()}
    assert plan(adapter=raw).of.keys() == plan().of.keys()
    two = {n.replace("default", "other"): s for n, s in raw.items()}
    with pytest.raises(Unsupported, match="2 adapters in one file: default, other"):
        plan(adapter={**raw, **two})


# Ties


def test_both_of_a_tie_are_changed_once() -> None:
    equal = plan(TIED_SHAPES, WORDS, TIED, is_equal=True)
    assert [len(own) for own in equal.of.values()] == [1]
    assert equal.config == {}
    ensured = plan(TIED_SHAPES, WORDS, TIED, ensure_weight_tying=True)
    assert ensured.of == equal.of
    stored_twice = plan(SHAPES, WORDS, TIED, is_equal=True)
    assert stored_twice.of.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert len(set(stored_twice.of.values())) == 1
    for layer in ("embedding", "head"):
        of_one = {n: shape for n, shape in WORDS.items() if layer[:4] in n}
        assert f"only the {layer} had the change" in plan(TIED_SHAPES, of_one, TIED).notes[0]


def test_factors_of_other_ranks_or_scales_are_never_the_same_change() -> None:
    longer = {**WORDS, f"{P}lm_head.lora_A.weight": (4, 4), f"{P}lm_head.lora_B.weight": (12, 4)}
    magnitudes = {f"{P}model.embed_tokens.lora_magnitude_vector": (4,)}
    magnitudes |= {f"{P}lm_head.lora_magnitude_vector": (12,)}
    ranks: dict[str, Any] = {"rank_pattern": {"lm_head": 4}, "alpha_pattern": {"lm_head": 8}}
    assert plan(TIED_SHAPES, longer, TIED, is_equal=True, **ranks).added
    assert plan(TIED_SHAPES, WORDS, TIED, alpha_pattern={"lm_head": 8}, is_equal=True).added
    assert plan(TIED_SHAPES, {**WORDS, **magnitudes}, TIED, use_dora=True, is_equal=True).added


def test_all_names_of_a_tied_tensor_are_changed() -> None:
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    saved = {f"{P}shared.weight": (15, 4)}
    result = plan(dict.fromkeys(names, (12, 4)), saved, {**TIED, "architectures": ["T5Model"]})
    assert result.of.keys() == result.shapes.keys() == {*names}


@pytest.mark.parametrize(
    ("more", "is_one"),
    [
        ({"model.types.embeddings.weight": (2, 4)}, True),  # fewer rows
        ({"model.patches.embeddings.weight": (20, 4, 3)}, True),
        ({"model.types.embeddings.weight": (20, 4), "lm_head.weight": (12, 4)}, True),
        ({"other.lm_head.weight": (12, 4), "lm_head.weight": (12, 4)}, False),
    ],
)
def test_a_tie_among_several_embeddings_or_heads(
    more: dict[str, tuple[int, ...]], *, is_one: bool
) -> None:
    result = plan({**more, **TIED_SHAPES}, WORDS, TIED, is_equal=True)
    noted = [n for n in result.notes if n.startswith("model.embed_tokens.weight is the head, too")]
    assert (len(noted), result.added) == (is_one, ())


def test_what_was_trained_apart_is_untied() -> None:
    result = plan(TIED_SHAPES, WORDS, TIED, is_equal=False)
    (head,) = result.added
    assert (head.name, head.shape) == ("lm_head.weight", (12, 4))
    assert head.copies == tensor("model.embed_tokens.weight", (12, 4)).copies
    assert {n: len(own) for n, own in result.of.items()} == {
        "model.embed_tokens.weight": 1,
        "lm_head.weight": 1,
    }
    assert result.config == {"tie_word_embeddings": False}
    assert "were trained apart" in "".join(result.notes)
    assert plan(TIED_SHAPES, WORDS, {}, is_equal=False).added == result.added


def test_saved_copies_of_a_tie_stay_tied_if_they_are_equal() -> None:
    saved = {f"{P}model.embed_tokens.weight": (12, 4), f"{P}lm_head.weight": (12, 4), **PAIR}
    equal = plan(TIED_SHAPES, saved, TIED, is_equal=True)
    assert (equal.added, equal.config) == ((), {})
    apart = plan(TIED_SHAPES, saved, TIED, is_equal=False)
    assert [t.name for t in apart.added] == ["lm_head.weight"]
    assert apart.added[0].copies == tensor(f"{P}lm_head.weight", (12, 4)).copies


@pytest.mark.parametrize(("of_head", "is_untied"), [([1, 3], False), ([1, 4], True)])
def test_tokens_of_a_tie_are_its_own_only_in_the_same_rows(
    of_head: list[int],
    is_untied: bool,  # noqa: FBT001
) -> None:
    ends = "token_adapter.trainable_tokens_delta"
    adapter = {f"{P}model.embed_tokens.{ends}": (2, 4), f"{P}lm_head.{ends}": (2, 4)}
    rows = {"embed_tokens": [1, 3], "lm_head": of_head}
    result = plan(TIED_SHAPES, adapter, TIED, is_equal=True, trainable_token_indices=rows)
    assert bool(result.added) == is_untied


def test_a_model_without_a_head_has_nothing_to_untie() -> None:
    saved = {f"{P}model.embed_tokens.weight": (12, 4), **PAIR}
    result = plan(TIED_SHAPES, saved, {**TIED, "architectures": ["LlamaModel"]})
    assert (result.added, result.config) == ((), {})
    stored = plan(SHAPES, saved, {**TIED, "architectures": ["LlamaModel"]})
    assert stored.config == {"tie_word_embeddings": False}


# What is refused


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "CARTRIDGE", "ADALORA", "VERA", "BONE"])
def test_every_other_kind_of_peft_is_refused_by_name(kind: str) -> None:
    with pytest.raises(Unsupported, match=r"^(?!peft_type)") as e:
        plan(peft_type=kind)
    assert "peft" in e.value.hint


def beside(extra: Mapping[str, Iterable[int]], **own: Any) -> dict[str, Any]:
    """Return the pair of factors, and these tensors beside it."""
    return {"adapter": {**PAIR, **{P + name: shape for name, shape in extra.items()}}, **own}


def experts(base: Mapping[str, Iterable[int]], adapter: Mapping[str, Iterable[int]]) -> Any:
    return {"base": base, "adapter": adapter, "config": QWEN}


DORA = {"use_dora": True}
EMBED, MAGNITUDES = "model.embed_tokens.weight", f"{Q}.lora_magnitude_vector"
ATTENTION = pair("attn", (2, 4), (12, 2)) | pair("attn.base_layer.out_proj", (2, 4), (4, 2))
LAYER_1 = {n.replace("s.0.", "s.1."): shape for n, shape in PAIR.items()}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "peft_type NEW": {"peft_type": "NEW"},
    "peft_type missing": {"peft_type": ""},
    "aLoRA": {"alora_invocation_tokens": [1]},
    "QALoRA": {"use_qalora": True},
    "Arrow": {"arrow_config": {"top_k": 2}},
    "BD-LoRA": {"use_bdlora": {"nblocks": 2}},
    "KaSA": {"kasa_config": {"beta": 1}},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "PiSSA": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "CorDA": {"init_lora_weights": "corda"},
    "LoRA-GA": {"init_lora_weights": "lora_ga"},
    "LoftQ": {"init_lora_weights": "loftq"},
    "does not know": {"init_lora_weights": "new"},
    "repeats what is": {"rank_pattern": {"((((.*)*)*)*)*q_projZ": 4}},
    "no bias there": beside({f"{Q}.lora_B.bias": (6,)}),
    "AdaLoRA": beside({f"{Q}.lora_E": (2, 1)}),
    "MultiheadAttention": {
        "base": {"attn.in_proj_weight": (12, 4), "attn.out_proj.weight": (4, 4)},
        "adapter": ATTENTION,
    },
    "how the base has it": experts(without(APART, "1.up"), factors_fused()),
    "DoRA of a layer that the base has in several tensors": {
        "base": {f"{LAYER}mlp.{part}_proj.weight": (3, 4) for part in ("gate", "up")},
        "adapter": pair(f"{LAYER}mlp.gate_up_proj", (2, 4), (6, 2))
        | {f"{P}{LAYER}mlp.gate_up_proj.lora_magnitude_vector": (6,)},
        "config": {"model_type": "minimax_m3_vl"},
        "use_dora": True,
    },
    "quantised .*gptq": {"config": {"quantization_config": {"quant_method": "gptq"}}},
    "quantised .*fp8": {"config": {"x": {"quantization_config": {"quant_method": "fp8"}}}},
    "quantised: it has .*absmax": {"base": {**SHAPES, f"{Q}.weight.absmax": (3,)}},
    "U8 in the base": {"dtype": "U8"},
    "I32, a floating type is expected": {"adapter_dtype": "I32"},
}
INCOMPLETE: dict[str, dict[str, Any]] = {
    "two factors": {"adapter": dict(list(PAIR.items())[:1])},
    "are empty": {"adapter": dict.fromkeys(PAIR, (0,))},
    "some are missing": experts(
        {n.replace("s.1.", "s.2."): s for n, s in APART.items()}, factors_fused()
    ),
}
CORRUPT: dict[str, dict[str, Any]] = {
    "rank 8, and .* of rank 2": {"r": 8},
    "r is '2'": {"r": "2"},
    "r is 0": {"r": 0},
    "r is 1000": {"r": 10**400},
    "lora_alpha is True": {"lora_alpha": True},
    "lora_alpha is nan": {"lora_alpha": float("nan")},
    "rank_pattern: x is 0": {"rank_pattern": {"x": 0}},
    "is no pattern": {"alpha_pattern": {"(": 1}},
    "0 of 1 modules": DORA,
    "use_dora false, and 1 of 1": beside({MAGNITUDES: (6,)}),
    "1 of 2 modules": {"adapter": {**PAIR, **LAYER_1, P + MAGNITUDES: (6,)}, **DORA},
    r"\(4,\), 6 magnitudes expected": beside({MAGNITUDES: (4,)}, **DORA),
    r"1 modules .*: model\.layers\.1\.self_attn\.q_proj$": {"adapter": {**PAIR, **LAYER_1}},
    r"\(6, 8\): another model": {"base": {f"{Q}.weight": (6, 8)}},
    r"\(4, 6\): another model": {"base": {f"{Q}.weight": (4, 6)}},
    "have no product": {"adapter": pair(Q, (2, 4), (6, 3))},
    "a convolution with groups": {
        "base": {f"{Q}.weight": (6, 4, 3)},
        "adapter": pair(Q, (2, 4, 3), (6, 2, 3)),
    },
    "another vocabulary": {
        "base": {**SHAPES, EMBED: (13, 4)},
        "adapter": {n: s for n, s in WORDS.items() if "embed" in n},
    },
    f"a vocabulary of 15 tokens in {EMBED}, and of 12 in lm_head": beside({EMBED: (15, 4)}),
    "a vocabulary of 15, 16 tokens": beside({EMBED: (15, 4), "lm_head.weight": (16, 4)}),
    rf"\(12, 4\), and {EMBED} of the base": beside(
        {"model.embed_tokens.base_layer.weight": (15, 4), EMBED: (12, 4)}
    ),
    r"\(5, 10\), and .* of the base has \(4, 10\)": beside(
        {f"{LAYER}mlp.down_proj.weight": (5, 10)}
    ),
    "2 modules of the adapter are not in the base: score, x": beside(
        {"score.weight": (3, 4), "x.weight": (4,)}, task_type="SEQ_CLS"
    ),
    "the base has 2 experts": experts(
        FUSED, {n.replace("s.1.", "s.2."): s for n, s in factors_apart().items()}
    ),
    "fit none of": experts(APART, pair(f"{LAYER}mlp.experts", (3, 3), (4, 3))),
    "DoRA or a bias over experts": experts(
        APART, {**DOWN_FACTORS, f"{OF_EXPERTS}lora_B.bias": (4,)}
    ),
    "no tensor that changes the base": {"adapter": {}},
}


@pytest.mark.parametrize(
    ("error", "text", "own"),
    [
        (error, text, own)
        for error, table in (
            (Unsupported, UNSUPPORTED),
            (Incomplete, INCOMPLETE),
            (Corrupt, CORRUPT),
        )
        for text, own in table.items()
    ],
)
def test_what_cannot_be_summed_is_refused_with_its_reason(
    error: type[CkptsyncError], text: str, own: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text) as e:
        plan(**own)
    assert e.value.hint


@pytest.mark.parametrize(
    "indices", [[3, 12], [3, 3], [-1, 3], {"tokens": [1, 3], "x": [1, 3]}, None]
)
def test_tokens_that_are_no_rows_of_the_vocabulary_are_refused(indices: object) -> None:
    adapted = beside({"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 4)})
    with pytest.raises(Corrupt, match="contradicts trainable_token_indices"):
        plan(**adapted, trainable_token_indices=indices)


@pytest.mark.parametrize(
    ("own", "is_named"),
    [
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, False),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.1"]}, False),
        ({"target_modules": ".*q_proj"}, False),
    ],
)
def test_layers_that_an_adapter_leaves_out_are_named(
    own: dict[str, Any], *, is_named: bool
) -> None:
    base = {**SHAPES, "model.layers.1.self_attn.q_proj.weight": (6, 4)}
    warnings = plan(base, **own).warnings
    assert ["model.layers.1.self_attn.q_proj" in w for w in warnings] == [True] * is_named


def test_a_base_that_was_quantised_for_the_training_is_told() -> None:
    (note,) = plan(base_model_name_or_path="unsloth/llama-bnb-4bit").notes
    assert "unsloth/llama-bnb-4bit (4bit)" in note
