import pytest

from ckptsync.doctor.room import full_training, parameters

QWEN_05 = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}
LLAMA_8 = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
MIXTRAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
}


@pytest.mark.parametrize(("config", "billions"), [(QWEN_05, 0.494), (LLAMA_8, 8.03), (MIXTRAL, 46.7)])
def test_parameters_are_those_that_the_models_have(config: dict[str, int], billions: float) -> None:
    assert abs(parameters(config) / 1e9 / billions - 1) < 0.01


def test_a_checkpoint_takes_fourteen_bytes_for_each() -> None:
    assert full_training(LLAMA_8) == parameters(LLAMA_8) * 14


def test_a_model_within_another_is_the_one_that_counts_and_other_kinds_are_not_guessed() -> None:
    assert parameters({"text_config": LLAMA_8}) == parameters(LLAMA_8)
    assert parameters({"d_model": 512, "num_layers": 6}) == 0
    assert parameters({**LLAMA_8, "hidden_size": True}) == parameters({**LLAMA_8, "vocab_size": -1}) == 0
