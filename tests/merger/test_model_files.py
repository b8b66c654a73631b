"""What is copied beside the weights, what in it leads to code, and what its reader should know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptsync.errors import Corrupt
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merger.model_files import (
    FUSED,
    LORA,
    NO_CONFIG,
    PACKED,
    config_dtype,
    files_beside,
    find_code,
    make_index,
    notes_on_model,
    set_dtype,
    strip_code,
)
from ckptsync.merger.plan import DType, MergeOptions, plan
from ckptsync.tensors import Copy, Extent, Part, Tensor


def tensor(name: str, dtype: str) -> Tensor:
    size = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}[dtype]
    return Tensor(
        name, dtype, (3,), (Copy(dtype, (3,), (Part((0,), (3,), Extent("f", 0, 3 * size)),)),)
    )


def test_what_from_pretrained_reads_is_copied_and_what_belongs_to_the_training_is_not() -> None:
    copied = """
        config.json generation_config.json tokenizer.json tokenizer.model merges.txt vocab.json
        special_tokens_map.json chat_template.jinja preprocessor_config.json modeling_custom.py
        configuration_custom.py adapter_config.json
    """.split()  # noqa: SIM905
    others = """
        trainer_state.json training_args.bin rng_state_0.pth optimizer.pt scheduler.pt latest
        zero_to_fp32.py model.safetensors model.safetensors.index.json sub/config.json train.py
        my_config.json all_results.json modeling_x.pyc modeling_x.so modeling_é.py CONFIG.json
        config.json/ ./config.json configuration.json modules.json inference.ipynb
    """.split()  # noqa: SIM905
    assert [name for name in copied + others if is_beside_weights(name)] == copied


def test_a_model_has_no_adapters_configuration_and_an_adapter_no_models() -> None:
    names = ["tokenizer.json", "config.json", "adapter_config.json", "x"]
    assert files_beside(names, adapter=False) == ("tokenizer.json", "config.json")
    assert files_beside(names, adapter=True) == ("tokenizer.json", "adapter_config.json")


def test_the_index_is_what_transformers_writes() -> None:
    plans = plan([tensor("b", "F32"), tensor("ä", "U8")], MergeOptions(max_shard_size=4))
    text = make_index(plans)
    assert json.loads(text) == {
        "metadata": {"total_parameters": 6, "total_size": 15},
        "weight_map": {
            "b": "model-00001-of-00002.safetensors",
            "ä": "model-00002-of-00002.safetensors",
        },
    }
    assert text.endswith(b"}\n")


@pytest.mark.parametrize(
    ("dtypes", "asked", "told"),
    [
        ("BF16 I64", "auto", "bfloat16"),
        ("BF16 I64", "keep", "bfloat16"),
        ("F16 I64", "fp16", "float16"),
        ("F32 I64", "fp32", "float32"),
        ("BF16 F32", "keep", "float32"),
        ("BF16 F32", "auto", None),  # the model itself mixes them
        ("I64", "auto", None),
    ],
)
def test_the_one_element_type_of_all_floats_is_told(
    dtypes: str, asked: DType, told: str | None
) -> None:
    assert config_dtype(dtypes.split(), asked) == told


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configuration_that_names_another_dtype_is_changed_and_nothing_else_in_it(
    key: str,
) -> None:
    config = {"a": [1, 2], key: "float32", "ü": "é", "deep": {"dtype": "x"}}
    assert json.loads(set_dtype(json.dumps(config).encode(), "bfloat16")) == config | {
        key: "bfloat16"
    }


NO_DTYPE = [b'{ "dtype" : "bfloat16"}', b'{"a": 1}', b'{"dtype": null}', b"", b"[1]", b"not json"]
NO_DTYPE += [b"[" * 100_000, b"\xff", b'{"dtype": 5}']


def test_a_configuration_that_needs_no_change_is_kept_byte_for_byte() -> None:
    for config in NO_DTYPE:
        assert set_dtype(config, "bfloat16") == config
    assert set_dtype(b'{"dtype":"float32"}', None) == b'{"dtype":"float32"}'


CODE = (
    '{"auto_map": {"AutoModel": "modeling_x.X"}}',
    '{"auto_map": ["modeling_x.X", null]}',
    '{"\\u0061uto_map": "anyone/repository--x.X"}',
    '{"auto_map": {"AutoModel": "modeling_x.X"}, "auto_map": {}}',
    '{"custom_pipelines": {"t": {"impl": "x.X"}}}',
    '{"trust_remote_code": true}',
    '{"trust_remote_code": 1}',
    '{"attn_implementation": "anyone/kernel"}',
    '{"_attn_implementation": {"": "eager", "text": "anyone/kernel"}}',
    '{"experts_implementation": "anyone/kernel"}',
    '{"auto_mapping": {"base_model_class": "X", "parent_library": "x"}}',
    '{"auto_mapping": {"base_model_class": "X", "parent_library": "transformers_modules.x"}}',
    '{"megatron_core": "x"}',
)


@pytest.mark.parametrize("text", CODE)
def test_what_leads_to_code_is_taken_out_wherever_it_stands(text: str) -> None:
    nested = (f'{{"vision_config": {text}}}', f'{{"all": [1, {text}]}}', f'{{"x": {text}, "x": 1}}')
    for outer in (text, *nested):
        held = outer[:-1] + ', "hidden_size": 8}'
        assert find_code("config.json", held.encode())
        cleaned = strip_code("config.json", held.encode(), {})
        assert not find_code("config.json", cleaned)
        assert json.loads(cleaned)["hidden_size"] == 8
    own = {"auto_map": {"AutoModel": "modeling_mine.Mine"}}  # the operator's file names it
    held = text[:-1] + ', "auto_map": {"AutoModel": "modeling_x.X"}}'
    assert json.loads(strip_code("config.json", held.encode(), own)) == own


def test_what_only_looks_like_it_stays_byte_for_byte() -> None:
    for text in (
        '{"label2id": {"auto_map": 3, "trust_remote_code": 0}}',
        '{"auto_map": null, "custom_pipelines": {}, "trust_remote_code": false}',
        '{"attn_implementation": "sdpa", "_name_or_path": "org/model"}',
        '{"megatron_core": "megatron.core", "auto_mapping": null}',
        (
            '{"auto_mapping": {"base_model_class": "X", "parent_library":'
            ' "transformers.models.llama.modeling_llama"}}'
        ),
        '["auto_map"]',
    ):
        assert strip_code("config.json", text.encode(), {"auto_map": 1}) == text.encode()


def test_a_configuration_that_cannot_be_read_is_not_said_to_be_without_code() -> None:
    utf_16 = '{"a": 1}'.encode("utf-16")
    for data in (b"{", b"\xff", b"[" * 100_000, utf_16, b'\xef\xbb\xbf{"a": 1}', b"1" * 5000):
        with pytest.raises(Corrupt, match="not JSON"):
            strip_code("config.json", data, {})


def notes(
    config: dict[str, Any] | None, *dtypes: str, asked: DType = "auto", name: str = "w"
) -> list[str]:
    return list(
        notes_on_model(
            [Tensor(f"{name}{n}", dtype, (2, 2), ()) for n, dtype in enumerate(dtypes)],
            config,
            asked,
        )
    )


def test_a_base_that_was_given_is_not_asked_for() -> None:
    weights, config = [Tensor("w", "F32", (2, 2), ())], {"dtype": "bfloat16"}
    (note,) = notes_on_model(weights, config, "auto", has_base=True)
    assert note.endswith("--dtype casts all of them")


@pytest.mark.parametrize(
    "config",
    [{"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"text_config": {"dtype": "bfloat16"}}],
)
def test_mixed_precision_that_stored_more_than_the_configuration_says_is_kept_and_said(
    config: dict[str, Any],
) -> None:
    assert (
        "all weights are stored as F32, and ckptsync keeps that"
        in notes(config, "F32", "F32", "I64")[0]
    )
    assert notes(config, "F32", asked="keep") == notes(config, "F32", "BF16") == []


@pytest.mark.parametrize(
    "config", [{"dtype": "float32"}, {"dtype": 5}, {"dtype": "nonsense"}, {"text_config": 5}, {}]
)
def test_otherwise_nothing_is_said(config: dict[str, Any]) -> None:
    assert notes(config, "F32") == []


def test_a_quantised_configuration_beside_plain_weights_is_said() -> None:
    config = {"quantization_config": {"quant_method": "x"}}
    assert "remove it from config.json" in notes(config, "BF16")[0]
    assert notes(config, "BF16", "U8") == notes(config, "F8_E4M3") == []


def test_what_others_may_not_be_able_to_open_is_said() -> None:
    assert notes(None, "F32") == [NO_CONFIG]
    assert notes({}, "F32") == []
    assert notes({}, "F32", name="q.lora_a.weight") == [LORA]
    experts = [Tensor("m.mlp.experts.down_proj", "F32", (2, 2, 2), ())]
    assert list(notes_on_model(experts, {}, "auto")) == [FUSED]
    for name in ("w.quant_state.bitsandbytes__nf4", "w.SCB"):
        packed = [Tensor("w", "U8", (8, 1), ()), Tensor(name, "F32", (2,), ())]
        assert list(notes_on_model(packed, {}, "auto")) == [PACKED]
