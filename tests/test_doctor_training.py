import json
from pathlib import Path

import pytest

from ckptsync.doctor.training import read
from ckptsync.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_of_llama_factorys_file_only_known_keys_are_taken_and_no_secret(tmp_path: Path) -> None:
    told = read(
        write(
            tmp_path / "x.yaml",
            "output_dir: saves/x\nsave_on_each_node: true\nsave_steps: 5\nhub_token: hf_1\nfinetuning_type: full\n",
        )
    )
    assert told == {"output_dir": "saves/x", "save_on_each_node": "true", "save_steps": "5", "finetuning_type": "full"}


@pytest.mark.parametrize(
    ("zero", "gathers"),
    [
        ({"stage": 3}, "false"),
        ({"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, "true"),
        ({"stage": 3, "stage3_gather_fp16_weights_on_model_save": False}, "false"),
    ],
)
def test_the_deepspeed_file_that_it_names_is_read(tmp_path: Path, zero: dict[str, object], gathers: str) -> None:
    write(tmp_path / "ds.json", json.dumps({"zero_optimization": zero}, indent="\t"))
    told = read(write(tmp_path / "x.yaml", "deepspeed: ds.json\n"))
    assert told == {"zero_stage": "3", "gather_16bit": gathers}
    assert read(tmp_path / "ds.json") == told


def test_accelerates_own_words_are_understood(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_save_16bit_model: false\n"
    assert read(write(tmp_path / "a.yaml", text)) == {"zero_stage": "3", "gather_16bit": "false"}


def test_a_deepspeed_file_that_is_not_there_is_the_trainings_to_say(tmp_path: Path) -> None:
    assert read(write(tmp_path / "x.yaml", "deepspeed: gone.json\n")) == {}


@pytest.mark.parametrize("text", ["- a\n", "a: [", "\x00"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read(write(tmp_path / "x.yaml", text))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.yaml")
