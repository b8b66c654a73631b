"""What a reader is told of weights and configuration that do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.merge.notes import FUSED, LORA, NO_CONFIG, PACKED, of_model
from ckptsync.merge.plan import DType
from ckptsync.model import Tensor


def notes(config: dict[str, Any] | None, *dtypes: str, asked: DType = "auto", name: str = "w") -> list[str]:
    return list(of_model([Tensor(f"{name}{n}", dtype, (2, 2), ()) for n, dtype in enumerate(dtypes)], config, asked))


def test_without_a_configuration_it_is_said_how_to_give_one() -> None:
    assert notes(None, "F32") == [NO_CONFIG]
    assert notes({}, "F32") == []
    assert "--config-from" in NO_CONFIG


@pytest.mark.parametrize("config", [{"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"text_config": {"dtype": "bfloat16"}}])
def test_mixed_precision_that_stored_more_than_the_configuration_says_is_kept_and_said(config: dict[str, Any]) -> None:
    assert "all weights are stored as F32: that is kept" in notes(config, "F32", "F32", "I64")[0]
    assert notes(config, "F32", asked="keep") == notes(config, "F32", "BF16") == []


@pytest.mark.parametrize("config", [{"dtype": "float32"}, {"dtype": 5}, {"dtype": "nonsense"}, {"text_config": 5}, {}])
def test_otherwise_nothing_is_said(config: dict[str, Any]) -> None:
    assert notes(config, "F32") == []


def test_a_quantised_configuration_beside_plain_weights_is_said() -> None:
    config = {"quantization_config": {"quant_method": "x"}}
    assert "take it out of config.json" in notes(config, "BF16")[0]
    assert notes(config, "BF16", "U8") == notes(config, "F8_E4M3") == []


def test_lora_that_is_not_pefts_is_said() -> None:
    assert notes({}, "F32", name="q.lora_a.weight") == [LORA]


def test_experts_in_one_tensor_are_said() -> None:
    assert list(of_model([Tensor("m.mlp.experts.down_proj", "F32", (2, 2, 2), ())], {}, "auto")) == [FUSED]


@pytest.mark.parametrize("name", ["w.quant_state.bitsandbytes__nf4", "w.SCB"])
def test_packed_bytes_are_said_to_be_copied_as_they_are(name: str) -> None:
    packed = [Tensor("w", "U8", (8, 1), ()), Tensor(name, "F32", (2,), ())]
    assert list(of_model(packed, {}, "auto")) == [PACKED]
