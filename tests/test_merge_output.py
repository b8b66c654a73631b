from __future__ import annotations

import json

import pytest

from ckptsync.merge.output import beside, dtype_to_tell, index, is_beside, with_dtype
from ckptsync.merge.plan import DTYPES, Options, plan
from ckptsync.model import Copy, Extent, Part, Tensor


def tensor(name: str, dtype: str) -> Tensor:
    size = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}[dtype]
    return Tensor(name, dtype, (3,), (Copy(dtype, (3,), (Part((0,), (3,), Extent("f", 0, 3 * size)),)),))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "vocab.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "modeling_custom.py",
        "configuration_custom.py",
        "adapter_config.json",
    ],
)
def test_what_from_pretrained_reads_is_copied(name: str) -> None:
    assert is_beside(name)


@pytest.mark.parametrize(
    "name",
    [
        "trainer_state.json",
        "training_args.bin",
        "rng_state_0.pth",
        "optimizer.pt",
        "scheduler.pt",
        "latest",
        "zero_to_fp32.py",
        "model.safetensors",
        "model.safetensors.index.json",
        "sub/config.json",
        "my_config.json",
        "all_results.json",
        "train.py",
    ],
)
def test_what_belongs_to_the_training_is_not(name: str) -> None:
    assert not is_beside(name)


def test_a_model_has_no_adapters_configuration_and_an_adapter_no_models() -> None:
    names = ["tokenizer.json", "config.json", "adapter_config.json", "x"]
    assert beside(names, adapter=False) == ("tokenizer.json", "config.json")
    assert beside(names, adapter=True) == ("tokenizer.json", "adapter_config.json")


def test_the_index_is_what_transformers_writes() -> None:
    plans = plan([tensor("b", "F32"), tensor("ä", "U8")], Options(max_shard_size=4))
    text = index(plans)
    assert json.loads(text) == {
        "metadata": {"total_parameters": 6, "total_size": 15},
        "weight_map": {"b": "model-00001-of-00002.safetensors", "ä": "model-00002-of-00002.safetensors"},
    }
    assert text.endswith(b"}\n")


@pytest.mark.parametrize("asked", DTYPES)
def test_the_one_element_type_of_all_floats_is_told(asked: str) -> None:
    found = dtype_to_tell(plan([tensor("w", "BF16"), tensor("n", "I64")], Options(asked)), asked)  # type: ignore[arg-type]
    assert found == {"auto": "bfloat16", "keep": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[asked]


def test_of_several_the_most_precise_is_told_unless_the_model_itself_mixes_them() -> None:
    plans = plan([tensor("w", "BF16"), tensor("v", "F32")], Options("keep"))
    assert (dtype_to_tell(plans, "keep"), dtype_to_tell(plans, "auto")) == ("float32", None)
    assert dtype_to_tell(plan([tensor("n", "I64")], Options()), "auto") is None


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configuration_that_names_another_dtype_is_changed_and_nothing_else_in_it(key: str) -> None:
    config = {"a": [1, 2], key: "float32", "ü": "é", "deep": {"dtype": "x"}}
    assert json.loads(with_dtype(json.dumps(config).encode(), "bfloat16")) == config | {key: "bfloat16"}


@pytest.mark.parametrize(
    "config",
    [
        b'{ "dtype" : "bfloat16"}',
        b'{"a": 1}',
        b'{"dtype": null}',
        b"",
        b"[1]",
        b"not json",
        b"[" * 100_000,
        b"\xff",
        b'{"dtype": 5}',
    ],
)
def test_a_configuration_that_needs_no_change_is_kept_byte_for_byte(config: bytes) -> None:
    assert with_dtype(config, "bfloat16") == config
    assert with_dtype(b'{"dtype":"float32"}', None) == b'{"dtype":"float32"}'


def test_any_text_in_a_configuration_survives() -> None:
    changed = with_dtype(b'{"dtype":"float32","a":"\\ud800","b":"\xc3\xbc"}', "bfloat16")
    assert json.loads(changed) == {"dtype": "bfloat16", "a": "\ud800", "b": "ü"}
