"""What launch scripts say of a training: nothing is run to know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.doctor.launch_scripts import is_script, read_script
from ckptsync.doctor.training_facts import output_dir_of, read_training
from ckptsync.errors import ConfigError

SCRIPTS = {
    "export OUT=/data\ntorchrun t.py \\\n  --output_dir $OUT/x \\\n  --lr 1": "/data/x",
    "torchrun t.py --output_dir=/data/x --save_on_each_node True": "/data/x",
    "cd /lf\nllamafactory-cli train x.yaml output_dir=saves/y": "/lf/saves/y",
    'ARGS="\n --output_dir /d/e\n --lr 1"\ntorchrun t.py $ARGS': "/d/e",
    'ARGS="--output_dir /d/e --lr 1"\ntorchrun t.py $ARGS && echo done': "/d/e",
    'ARGS=(\n --save /m/ck\n)\ntorchrun "${ARGS[@]}"': "/m/ck",
    "python -m verl.trainer.main_ppo trainer.default_local_dir=/ck trainer.n_gpus=8": "/ck",
    'O=${OUT_OF_NOWHERE:-/d}\ntorchrun t.py --output-dir "$O/a b" # --output_dir /no': "/d/a b",
    "A=r1; B=/out\ndeepspeed --hostfile h t.py --output_dir ${B}/${A}": "/out/r1",
    "srun bash -c 'torchrun t.py --output_dir /in/quotes'": "/in/quotes",
    "ray job submit -- python t.py --output_dir /ray/x": "/ray/x",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_where_its_training_writes(script: str) -> None:
    assert read_script(script, {}).options["output_dir"] == SCRIPTS[script]


@pytest.mark.parametrize("path", ["$1", "/x/$(date)", "$GONE/x", "/x/`hostname`", "$R/x"])
def test_what_only_a_shell_knows_is_not_guessed(path: str) -> None:
    script = f'R=$(mktemp -d)\ntorchrun t.py --output_dir "{path}"'
    told = read_script(script, {"R": "/before"}).options
    assert told["output_dir"]
    assert output_dir_of(told) == ""


def test_configurations_that_a_script_names_are_read_and_its_options_win(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("output_dir: saves/x\nfinetuning_type: lora\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "data.json").write_text("[1, 2]")
    script = tmp_path / "launch.sh"
    script.write_text(
        "#!/bin/bash\nllamafactory-cli train x.yaml finetuning_type=full --data data.json\n"
        "accelerate launch t.py --deepspeed ds.json\n"
    )
    told = read_training(script)
    assert (told["output_dir"], told["finetuning_type"]) == ("saves/x", "full")
    assert told["zero_stage"] == "3"
    script.write_text("echo nothing\n")
    with pytest.raises(ConfigError, match="names no output_dir"):
        read_training(script)


def test_a_script_is_known_by_its_name_or_its_first_line() -> None:
    assert is_script("train.sbatch", "")
    assert is_script("train", "#!/usr/bin/env bash\n")
    assert not is_script("train.py", "#!/usr/bin/env python\n")
    assert not is_script("x.yaml", "output_dir: x\n")
