"""Against a base model, what is missing, unexpected or misshapen has a name."""

from __future__ import annotations

import pytest

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.merger.base_comparison import BaseModel, read_base
from ckptsync.tensors import Shape, Tensor
from tests.support.files_in_memory import MemoryFiles, safetensors_file

P = "base_model.model."


def tensors(**shapes: Shape) -> list[Tensor]:
    return [tensor(name.replace("__", "."), shape) for name, shape in shapes.items()]


def tensor(name: str, shape: Shape = (2, 2), dtype: str = "F32") -> Tensor:
    return Tensor(name, dtype, shape, ())


def base(*given: Tensor) -> BaseModel:
    return BaseModel(given)


MODEL = base(*tensors(a=(2,), b__c=(3, 2), d=()))


def test_a_directory_is_read_by_its_headers_alone() -> None:
    files = MemoryFiles(
        {"model.safetensors": safetensors_file({"w": ("BF16", (500,), bytes(1000))})}
    )
    assert read_base(files).tensors["w"].shape == (500,)
    assert files.read < 1000


def test_an_adapter_is_no_base_and_nothing_is_none() -> None:
    with pytest.raises(Unsupported, match="an adapter, a model is expected"):
        read_base(
            MemoryFiles(
                {
                    "adapter_model.safetensors": safetensors_file({"w": ("U8", (1,), b"x")}),
                    "adapter_config.json": b"{}",
                }
            )
        )
    with pytest.raises(Unsupported, match=r"^--base: no known checkpoint"):
        read_base(MemoryFiles({"config.json": b"{}"}))


def test_what_is_missing_is_named_and_counted() -> None:
    with pytest.raises(
        Incomplete, match=r"^2 of the base model's 3 tensors are missing \(1 are there\): b\.c, d$"
    ):
        MODEL.compare(tensors(a=(2,)))
    assert MODEL.compare(tensors(a=(2,), b__c=(3, 2)), tied=("d",))


def test_what_has_another_shape_is_corrupt_whatever_else_is_missing() -> None:
    with pytest.raises(Corrupt, match=r"^b\.c is \[2, 3\], \[3, 2\] in the base model$"):
        MODEL.compare(tensors(a=(2,), b__c=(2, 3)))


def test_what_the_base_has_not_is_noted() -> None:
    notes = MODEL.compare(tensors(a=(2,), b__c=(3, 2), d=(), e=(), f=()), tied=("f",))
    assert notes[0] == "1 of 5 tensors are not in the base model: e"


@pytest.mark.parametrize(
    "name", ["m.rotary_emb.inv_freq", "h.0.attn.bias", "h.0.attn.masked_bias", "e.position_ids"]
)
def test_buffers_that_newer_models_compute_need_not_be_there(name: str) -> None:
    assert base(tensor("a", (2,)), tensor(name)).compare(tensors(a=(2,)))


def test_a_vocabulary_that_was_resized_is_said_and_not_called_corrupt() -> None:
    there = base(tensor("m.embed_tokens.weight", (5, 2)), tensor("lm_head.weight", (5, 2)))
    notes = there.compare(
        [tensor("m.embed_tokens.weight", (8, 2)), tensor("lm_head.weight", (8, 2))]
    )
    assert [n.partition(" has ")[0] for n in notes[:2]] == [
        "m.embed_tokens.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("embedding", "head"), [((8, 2), (7, 2)), ((8, 2), (5, 2)), ((8, 3), (8, 3)), ((8, 2), (8, 3))]
)
def test_embeddings_that_do_not_agree_are_corrupt(embedding: Shape, head: Shape) -> None:
    there = base(tensor("m.embed_tokens.weight", (5, 2)), tensor("lm_head.weight", (5, 2)))
    with pytest.raises(Corrupt, match="in the base model"):
        there.compare([tensor("m.embed_tokens.weight", embedding), tensor("lm_head.weight", head)])


def test_a_base_that_is_a_part_of_the_model_or_has_it_as_a_part_is_compared_all_the_same() -> None:
    part = tensors(wte=(5,), h=(2,))
    whole = tensors(transformer__wte=(5,), transformer__h=(2,), head=(1,))
    assert "1 of 3 tensors are not in the base model: head" in base(*part).compare(whole)
    missing = r"1 of the base model's 3 tensors are missing \(2 are there\): head"
    with pytest.raises(Incomplete, match=missing):
        base(*whole).compare(part)
    with pytest.raises(Corrupt, match=r"transformer\.wte"):
        base(*tensors(wte=(6,), h=(2,))).compare(whole)


def test_auto_takes_the_bases_dtype_where_both_are_floats() -> None:
    there = base(
        *(tensor(n, dtype=d) for n, d in zip("anqs", ("BF16", "BF16", "U8", "F32"), strict=True))
    )
    own = {"a": "F32", "n": "I64", "q": "F32", "s": "BF16", "new": "F32"}
    given = [tensor(n, dtype=d) for n, d in own.items()]
    assert [t.dtype for t in there.with_dtypes(given)] == ["BF16", "I64", "F32", "F32", "F32"]
    packed, resized = tensor("a", (4, 1)), tensor("s", (9, 2), "BF16")
    assert [t.dtype for t in there.with_dtypes([packed, resized])] == ["F32", "F32"]


def adapter(a: Shape = (3, 4), b: Shape = (6, 3), module: str = "m.q") -> list[Tensor]:
    return [tensor(f"{P}{module}.lora_A.weight", a), tensor(f"{P}{module}.lora_B.weight", b)]


@pytest.mark.parametrize("stored", [(6, 4), (4, 6)])
def test_an_adapter_fits_the_modules_that_the_base_has(stored: Shape) -> None:
    assert base(tensor("m.q.weight", stored)).compare_adapter(adapter()) == ()


@pytest.mark.parametrize(("a", "b"), [((3, 5), (6, 3)), ((3, 4), (7, 3))])
def test_an_adapter_of_other_shapes_is_another_models(a: Shape, b: Shape) -> None:
    with pytest.raises(Corrupt, match="shapes do not match the base model"):
        base(tensor("m.q.weight", (6, 4))).compare_adapter(adapter(a, b))


def test_modules_that_are_saved_whole_and_prompts_are_looked_for_too() -> None:
    there = base(tensor("lm_head.weight"), tensor("m.e.weight"))
    names = ("lm_head.weight", "m.e.token_adapter.trainable_tokens_delta", "m.e.base_layer.weight")
    assert (
        there.compare_adapter([*(tensor(P + n) for n in names), tensor("prompt_embeddings")]) == ()
    )


def test_a_quantised_bases_shapes_are_not_compared() -> None:
    packed = base(tensor("m.q.weight", (12, 1), "U8"))
    assert packed.compare_adapter(adapter()) == ()
    assert packed.compare([tensor("m.q.weight", (6, 4))])
    assert base(tensor("m.q.weight", (6, 4))).compare([tensor("m.q.weight", (12, 1), "U8")])


FILES_OF_VLM = """language_model.model.l.0.w language_model.lm_head.weight
    vision_tower.vision_model.w visual.p""".split()  # noqa: SIM905

MEMORY_OF_VLM = (
    "model.language_model.l.0.w",
    "lm_head.weight",
    "model.vision_tower.w",
    "model.visual.p",
)


def test_a_vision_models_files_and_memory_name_the_same_tensors_differently() -> None:
    there = base(*(tensor(n, (9, n_)) for n_, n in enumerate(FILES_OF_VLM)))
    own = [tensor(n, (9, n_)) for n_, n in enumerate(MEMORY_OF_VLM)]
    assert there.compare(own) == ("names and shapes compared with the base model's 4 tensors",)
    with pytest.raises(Corrupt, match=r"model\.visual\.p is \[9, 4\], \[9, 3\] in the base model"):
        there.compare([*own[:3], tensor("model.visual.p", (9, 4))])
    with pytest.raises(
        Incomplete,
        match=(
            r"1 of the base model's 4 tensors are missing \(3 are there\):"
            r" language_model\.lm_head\.weight"
        ),
    ):
        there.compare([own[0], *own[2:]])


def test_names_that_differ_only_in_where_they_are_kept_are_not_taken_for_each_other() -> None:
    there = base(tensor("model.w", (1,)), tensor("language_model.w", (2,)))
    assert there.under_names_of(["w", "x"]).keys() != {"w"}


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_experts_that_are_one_tensor_in_memory_are_compared_with_one_an_expert(block: str) -> None:
    experts = [f"l.{block}.experts.{n}.w{m}.weight" for n in range(3) for m in range(3)]
    there = base(
        tensor(f"l.{block}.gate.weight", (3, 2)), *(tensor(n, (4, 2), "BF16") for n in experts)
    )
    own = [
        tensor("l.mlp.gate.weight", (3, 2)),
        tensor("l.mlp.experts.gate_up_proj", (3, 8, 2)),
        tensor("l.mlp.experts.down_proj", (3, 2, 4)),
    ]
    assert there.compare(own)
    assert [t.dtype for t in there.with_dtypes(own)] == ["F32", "BF16", "BF16"]
    mixed = base(*there.tensors.values(), tensor(experts[0], (4, 2), "F16"))
    assert [t.dtype for t in mixed.with_dtypes(own)] == ["F32"] * 3
    with pytest.raises(Incomplete, match="9 of the base model's 10"):
        there.compare([*own[:2], tensor("l.mlp.experts.down_proj", (2, 2, 4))])


def test_an_adapter_finds_the_modules_of_a_base_under_other_names() -> None:
    there = base(tensor("language_model.model.q.weight", (6, 4)), tensor("h.x.experts.0.w1.weight"))
    assert there.compare_adapter(adapter(module="model.language_model.q")) == ()
    nested = (f"{P}h.x.experts.lora_A.weight", f"{P}h.x.experts.base_layer.lora_A.weight")
    assert there.compare_adapter([tensor(n) for n in nested]) == ()


def test_a_head_of_its_own_or_one_that_the_base_has_tied_is_no_other_models() -> None:
    there = base(tensor("m.e.weight"))
    assert there.compare_adapter([tensor(f"{P}score.weight")]) == (
        f"1 of 1 tensors are not in the base model: {P}score.weight",
    )
    assert there.compare_adapter([tensor(f"{P}lm_head.lora_A.weight")]) == ()
