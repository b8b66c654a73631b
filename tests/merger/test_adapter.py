"""Adapters out of a PEFT model's state dict, under the names that peft 0.21.2 saves."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.merger.adapter import check_rank, select, split_source
from ckptsync.tensors import Copy, Shape, Tensor

P = "base_model.model."
LORA = ("model.q.lora_A.default.weight", "model.q.lora_B.default.weight")
BASE = (
    "model.q.base_layer.weight",
    "model.q.base_layer.bias",
    "model.norm.weight",
    "model.norm.bias",
)
SAVED = [f"{P}model.q.lora_A.weight", f"{P}model.q.lora_B.weight"]
OWN = ["model.q.weight", "model.q.bias", "model.norm.weight", "model.norm.bias"]


def tensors(*names: str, shape: Shape = (2, 3), prefix: str = P) -> list[Tensor]:
    return [Tensor(prefix + name, "F32", shape, (Copy("F32", shape, ()),)) for name in names]


def names(
    given: list[Tensor], part: str = "", config: dict[str, object] | None = None
) -> list[str]:
    return [t.name for t in select(given, part, config).tensors]


@pytest.mark.parametrize(
    ("stored", "saved"),
    [
        ("m.q.lora_A.default.weight", "m.q.lora_A.weight"),
        ("m.q.lora_B.default.bias", "m.q.lora_B.bias"),
        ("m.embed_tokens.lora_embedding_A.default", "m.embed_tokens.lora_embedding_A"),
        ("m.q.lora_magnitude_vector.default.weight", "m.q.lora_magnitude_vector"),
        ("m.q.lora_magnitude_vector.default", "m.q.lora_magnitude_vector"),
        ("m.q.lora_magnitude_vector", "m.q.lora_magnitude_vector"),
        ("m.q.lora_A.weight", "m.q.lora_A.weight"),
        ("default.q.lora_A.default.weight", "default.q.lora_A.weight"),
        ("lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("score.modules_to_save.default.out.0.bias", "score.out.0.bias"),
        (
            "m.embed.token_adapter.trainable_tokens_delta.default",
            "m.embed.token_adapter.trainable_tokens_delta",
        ),
        ("m.norm.ln_tuning_layers.default.weight", "m.norm.ln_tuning_layers.weight"),
        ("m.q.glora_A.default.Xd", "m.q.glora_A.Xd"),
        ("m.q.glora_C.zeros", "m.q.glora_C.zeros"),
        ("m.q.gralora_A_general.default.weight", "m.q.gralora_A_general.weight"),
        ("m.q.osf_svd_params.default.S_low", "m.q.osf_svd_params.S_low"),
        ("m.q.osf_svd_params.U_low", "m.q.osf_svd_params.U_low"),
        ("m.q.peanut_A.default.weight", "m.q.peanut_A.weight"),
        ("m.q.poly_router.default.module_logits", "m.q.poly_router.module_logits"),
        ("m.q.psoft_R.default.vector_a", "m.q.psoft_R.vector_a"),
        ("m.q.waveft_spectrum.default", "m.q.waveft_spectrum"),
        ("m.self_attn.adaption_gate", "m.self_attn.adaption_gate"),
    ],
)
def test_the_adapters_name_is_taken_out_as_peft_does(stored: str, saved: str) -> None:
    assert names(tensors(stored)) == [P + saved]


def test_the_base_model_in_the_same_shards_is_left_out_and_said() -> None:
    found = select(tensors(*LORA, *BASE), "", None)
    assert [t.name for t in found.tensors] == SAVED
    assert (found.adapter, found.notes[1].partition(":")[0]) == (
        "default",
        "4 tensors of its base model are in the same shards and are left out",
    )


def test_a_base_model_is_left_out_where_the_adapters_name_was_taken_out_before() -> None:
    stored = [name.replace(".default", "") for name in LORA] + [
        "e.embed_tokens.lora_embedding_A",
        "e.embed_tokens.base_layer.weight",
    ]
    # as peft saves an embedding that is adapted
    assert names(tensors(*stored)) == [P + n for n in stored]
    assert names(tensors(*stored, *BASE)) == [P + n for n in stored[:3]]
    assert names(tensors(*stored, *BASE), "base") == ["e.embed_tokens.weight", *OWN]


def test_the_base_model_can_be_had_under_its_own_names() -> None:
    heads = ("lm_head.original_module.weight", "lm_head.modules_to_save.default.weight")
    found = select(tensors(*LORA, *BASE, *heads), "base", None)
    assert ([t.name for t in found.tensors], found.adapter) == ([*OWN, "lm_head.weight"], None)


def test_an_embedding_with_adapted_tokens_is_in_the_base_model_once() -> None:
    stored = (
        "e.token_adapter.trainable_tokens_delta.default",
        "e.token_adapter.base_layer.weight",
        "e.original_module.weight",
    )
    assert names(tensors(*stored), "base") == ["e.weight"]
    assert names(tensors(*stored)) == [f"{P}e.token_adapter.trainable_tokens_delta"]


def test_a_base_model_that_is_not_there_is_not_made_up() -> None:
    for given in (tensors(*LORA), tensors("model.norm.weight", prefix="")):
        with pytest.raises(Unsupported, match="@base"):
            select(given, "base", None)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({}, []),
        ({"bias": "none"}, []),
        ({"bias": "lora_only"}, ["model.q.base_layer.bias"]),
        ({"bias": "all"}, ["model.q.base_layer.bias", "model.norm.bias"]),
        ({"bias": ["all"], "target_modules": [["lm_head"]]}, []),
    ],
)
def test_biases_are_the_adapters_if_its_configuration_says_so(
    config: dict[str, object], more: list[str]
) -> None:
    assert names(tensors(*LORA, *BASE), config=config) == [*SAVED, *(P + n for n in more)]


def test_an_embedding_that_is_adapted_is_saved_with_its_base_as_peft_does() -> None:
    given = tensors(
        "model.embed_tokens.lora_embedding_A.default",
        "model.embed_tokens.base_layer.weight",
        "model.norm.weight",
    )
    listed: dict[str, object] = {"target_modules": ["embed_tokens"]}
    for config, count in (
        (listed, 2),
        (listed | {"target_modules": ".*embed_tokens"}, 2),
        (listed | {"trainable_token_indices": [1]}, 1),
        (listed | {"peft_type": "TRAINABLE_TOKENS"}, 1),
    ):
        assert len(names(given, config=config)) == count


def test_what_was_trained_beside_an_adapter_stays_with_it_where_no_base_is_there() -> None:
    given = tensors(*LORA, "model.q.base_layer.bias", "model.norm.weight")
    assert names(given)[2:] == [f"{P}model.q.base_layer.bias", f"{P}model.norm.weight"]


def test_an_adapter_that_was_injected_gets_the_prefix_that_peft_saves() -> None:
    given = tensors(*LORA, *BASE, prefix="")
    assert names(given, "adapter") == names(given, config={}) == SAVED
    assert names(given, "base") == OWN


def test_parameters_that_are_adapted_one_within_the_other_are_found() -> None:
    stored = (
        "x.experts.lora_A.default.weight",
        "x.experts.base_layer.lora_A.default.weight",
        "x.experts.base_layer.base_layer.down_proj",
    )
    assert names(tensors(*stored)) == [
        f"{P}x.experts.lora_A.weight",
        f"{P}x.experts.base_layer.lora_A.weight",
    ]
    assert names(tensors(*stored), "base") == ["x.experts.down_proj"]


def test_of_several_adapters_one_must_be_chosen() -> None:
    given = tensors(*LORA, "model.q.lora_A.other.weight")
    with pytest.raises(Unsupported, match="2 adapters in one checkpoint: default, other"):
        select(given, "", None)
    assert names(given, "adapter=other") == [f"{P}model.q.lora_A.weight"]
    nameless = tensors("model.q.lora_magnitude_vector")  # of whichever adapter
    assert len(names([*given, *nameless], "adapter=other")) == 2
    with pytest.raises(Unsupported, match="no adapter of that name"):
        select(given, "adapter=third", None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.q.adamss_A.default.0", "AdaMSS"),
        ("m.q.frod_lambda_l.default", "FRoD"),
        ("m.q.ia3_l.a.b", "ia3_l"),
        ("m.q.lily_B.default.weight", "Lily"),
        ("m.q.lora_A.default.0.weight", "lora_A"),
        ("m.q.lora_E.default", "AdaLoRA"),
        ("m.q.peanut_encoders.default.0.weight", "PEANuT with a depth"),
        ("m.q.pvera_lambda_b.default", "PVeRA"),
        ("m.q.tinylora_v.default.0", "TinyLoRA"),
        ("m.q.unilora_theta_d.default", "UniLoRA"),
        ("m.q.vblora_logits_A.default", "VB-LoRA"),
        ("m.q.vera_lambda_b.default", "VeRA"),
        ("m.shadow_down.default.weight", "Shadow"),
        ("m.internal_xlora_classifier.layers.0.weight", "X-LoRA"),
    ],
)
def test_what_peft_computes_when_it_saves_or_nests_otherwise_is_refused(
    name: str, kind: str
) -> None:
    with pytest.raises(Unsupported, match=f"cannot merge sharded adapters of the kind {kind}$"):
        select(tensors(name), "", None)


@pytest.mark.parametrize(
    ("trained", "untrained", "config"),
    [
        ("delora_A", "delora_w_norm", {}),
        ("randlora_lambda", "randlora_A", {"save_projection": False}),
        ("shira_weight", "shira_indices", {}),
        ("supertuning_values", "supertuning_indices", {"save_precomputed_indices": False}),
    ],
)
def test_an_adapter_without_what_peft_saves_untrained_is_refused(
    trained: str, untrained: str, config: dict[str, object]
) -> None:
    given = tensors(f"m.q.{trained}.default", f"m.q.{untrained}.default")
    assert names(given) == [f"{P}m.q.{trained}", f"{P}m.q.{untrained}"]
    with pytest.raises(Unsupported, match=f"without its {untrained}"):
        select(given[:1], "", None)
    if config:
        assert names(given[:1], config=config) == [f"{P}m.q.{trained}"]


def test_an_adaption_prompt_is_saved_without_the_model_around_it() -> None:
    own = ("layers.0.self_attn.adaption_prompt", "layers.0.self_attn.adaption_gate")
    given = tensors(*own, "layers.0.self_attn.model.q_proj.weight", "layers.0.mlp.weight")
    assert names(given) == [P + name for name in own]
    with pytest.raises(Unsupported, match="prompt-tuned"):
        select(given, "base", None)


def test_prompt_embeddings_are_saved_as_they_are_and_an_encoder_is_refused() -> None:
    stored = ("prompt_encoder.p.embedding.weight", "base_model.lm_head.weight", "word.weight")
    given = tensors(*stored, prefix="")
    assert names(given) == ["prompt_embeddings"]
    for saved in ("prompt_embeddings", "prefix_task_cols"):
        assert names(tensors(saved, prefix="")) == [saved]
    of_tasks = ("prompt_encoder.p.embedding.weight", "prompt_encoder.p.prefix_task_rows")
    assert names(tensors(*of_tasks, prefix="")) == ["prompt_embeddings", "prefix_task_rows"]
    for end in ("mlp_head.0.weight", "trainable_embedding"):
        with pytest.raises(Unsupported, match="has to run this prompt encoder"):
            select(tensors(f"prompt_encoder.p.{end}", prefix=""), "", None)
    with pytest.raises(Unsupported, match="prompt-tuned"):
        select(given, "base", None)
    of_sam = ("prompt_encoder.no_mask_embed.weight", "mask_decoder.x.weight")
    assert names(tensors(*of_sam, prefix="")) == list(of_sam)


def test_a_model_may_have_such_parts_of_its_own_where_nothing_speaks_of_an_adapter() -> None:
    stored = ("q.base_layer.weight", "q.lora_A.vision.weight", "q.lora_A.speech.weight")
    assert names(tensors(*stored, prefix="")) == list(stored)


@pytest.mark.parametrize(
    "name", ["model.q.weight", "layers.0.wq.lora_a.weight", "base.q.lora_A.weight"]
)
def test_names_that_peft_does_not_give_are_no_adapter(name: str) -> None:
    found = select(tensors(name, prefix=""), "", {})
    assert (found.adapter, [t.name for t in found.tensors]) == (None, [name])


def test_a_tie_to_what_is_left_out_is_forgotten() -> None:
    given = [
        *tensors(*LORA),
        Tensor(f"{P}lm_head.weight", "F32", (), (), tied=f"{P}e"),
        Tensor(f"{P}m.lora_A.default", "F32", (), (), tied=f"{P}e"),
    ]
    assert [t.tied for t in select(given, "", None).tensors] == [None] * 4


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, (None, "")),
        ("dcp:x", ("dcp:x", "")),
        ("dcp:x@base", ("dcp:x", "base")),
        ("@adapter", (None, "adapter")),
        ("a@b@adapter=c.d", ("a@b", "adapter=c.d")),
        ("a@basement", ("a@basement", "")),
    ],
)
def test_a_source_may_name_one_half(wanted: str | None, found: tuple[str | None, str]) -> None:
    assert split_source(wanted) == found


def test_a_configuration_of_another_rank_is_another_adapters() -> None:
    factors = [("q.lora_A.weight", (4, 7)), ("q.lora_B.weight", (7, 4))]
    factors += [("e.lora_embedding_A", (4, 7)), ("e.lora_embedding_B", (7, 4))]
    for name, shape in factors:
        found = select(tensors(name, shape=shape), "", None)
        check_rank(found, {"peft_type": "LORA", "r": 4})
        for config in (
            {"r": 8},
            {"peft_type": "LORA", "r": 8, "rank_pattern": {"q": 4}},
            {"peft_type": "LORA", "r": 8, "target_parameters": ["experts.x"]},
            {"peft_type": "LORA", "r": "8"},
        ):
            check_rank(found, config)
        with pytest.raises(Corrupt, match="rank 8, and"):
            check_rank(found, {"peft_type": "LORA", "r": 8})


def test_of_peft_models_inside_one_another_none_is_written() -> None:
    with pytest.raises(Unsupported, match="a PEFT model inside of another"):
        select(tensors(f"m.{P}{LORA[0]}"), "", None)


def test_the_tokens_of_a_tied_head_are_saved_once() -> None:
    ends = "token_adapter.trainable_tokens_delta"
    given = tensors(f"model.embed_tokens.{ends}.default", f"lm_head.{ends}.default")
    embedding, head = (f"{P}{name}.{ends}" for name in ("model.embed_tokens", "lm_head"))
    assert names(given, config={"trainable_token_indices": [1]}) == [embedding]
    both: dict[str, object] = {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [1]}}
    assert names(given, config=both) == [embedding, head]
