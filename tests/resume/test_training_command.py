"""The arguments of a training, with and without a checkpoint."""

from __future__ import annotations

import contextlib

import pytest

from ckptsync.errors import ConfigError
from ckptsync.resume.training_command import (
    RESUME_FROM,
    Resumed,
    check_command,
    check_nodes_of_command,
    command_for,
    environment_for,
)

RESUMED = Resumed("/data/out/checkpoint-900", 900)
PATH = RESUMED.path
TABLE = [
    # COMMAND, with a checkpoint, with none
    ("train.py --resume_from_checkpoint {checkpoint}", f"--resume_from_checkpoint {PATH}", ""),
    ("train.py --resume={checkpoint}", f"--resume={PATH}", ""),
    ("train.py x.yaml resume_from_checkpoint={checkpoint}", f"x.yaml resume_from_checkpoint={PATH}",
     "x.yaml"),
    ("train.py +ckpt.path={checkpoint} lr=1", f"+ckpt.path={PATH} lr=1", "lr=1"),
    ("train.py ++ckpt.path={checkpoint}", f"++ckpt.path={PATH}", ""),
    ("train.py {checkpoint}", PATH, ""),
    ("train.py --bf16=1 {checkpoint} --lr 1", f"--bf16=1 {PATH} --lr 1", "--bf16=1 --lr 1"),
    ("train.py -m ckpt={checkpoint}", f"-m ckpt={PATH}", "-m"),
    ("train.py -- {checkpoint}", f"-- {PATH}", "--"),
    ("train.py - {checkpoint}", f"- {PATH}", "-"),
    ("train.py --load {checkpoint} --load-step {step}", f"--load {PATH} --load-step 900", ""),
    ("train.py --weights {checkpoint}/model.pt", f"--weights {PATH}/model.pt", ""),
    ("train.py --range {step}..{step}", "--range 900..900", ""),
    ('train.py --config {"a":1} {} {other} {{x}}', '--config {"a":1} {} {other} {{x}}',
     '--config {"a":1} {} {other} {{x}}'),
    ("train.py a", "a", "a"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "resumed", "fresh"), TABLE, ids=lambda text: text[:50])
def test_placeholders_are_replaced_or_left_out(command: str, resumed: str, fresh: str) -> None:
    words = command.split()
    check_command(words)
    assert command_for(words, RESUMED) == ["train.py", *resumed.split()]
    assert command_for(words, None) == ["train.py", *fresh.split()]


LF, VERL = "resume_from_checkpoint", "trainer.resume_mode=resume_path"
TRAINERS = [
    ("llamafactory", "llamafactory-cli train x.yaml lr=1", [f"{LF}={PATH}"], []),
    ("llamafactory", "llamafactory-cli train x.yml", [f"{LF}={PATH}"], []),
    ("llamafactory", "torchrun src/train.py x.json", [f"{LF}={PATH}"], []),
    ("llamafactory", "llamafactory-cli train --deepspeed z3.json", [f"--{LF}", PATH], []),
    ("llamafactory", "llamafactory-cli train --stage sft", [f"--{LF}", PATH], []),
    ("hf", "torchrun run_clm.py --output_dir out", [f"--{LF}", PATH], []),
    ("torchtitan", "torchrun -m torchtitan.train", ["--checkpoint.load_step", "900"], []),
    ("verl", "python -m verl.trainer.main_ppo", [VERL, f"trainer.resume_from_path={PATH}"],
     ["trainer.resume_mode=disable"]),
    ("lightning", "python main.py fit -c x.yaml", ["--ckpt_path", PATH], []),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "command", "resumed", "fresh"), TRAINERS)
def test_each_trainer_gets_what_it_reads(
    trainer: str, command: str, resumed: list[str], fresh: list[str]
) -> None:
    words = command.split()
    check_command(words, trainer)
    assert command_for(words, RESUMED, trainer) == [*words, *resumed]
    assert command_for(words, None, trainer) == [*words, *fresh]


QUOTED = r"trainer.resume_from_path='/my out/it\'s=1/global_step_4'"
ODD_PATHS = [
    (["--load", "{checkpoint}", "--step", "{step}"], "", "/out/final", None,
     ["--load", "/out/final"]),
    (["{checkpoint}"], "", "/my out/{step}/checkpoint-1", 1, ["/my out/{step}/checkpoint-1"]),
    ([], "verl", "/my out/it's=1/global_step_4", 4, [VERL, QUOTED]),
    ([], "torchtitan", "/out/final", None, []),  # it takes a step
]  # fmt: skip


@pytest.mark.parametrize(("words", "trainer", "path", "step", "expected"), ODD_PATHS)
def test_a_path_without_a_step_or_with_unusual_characters(
    words: list[str], trainer: str, path: str, step: int | None, expected: list[str]
) -> None:
    assert command_for(["x", *words], Resumed(path, step), trainer) == ["x", *expected]


@pytest.mark.parametrize(
    ("command", "trainer", "why"),
    [
        ([], "", "no command"),
        (["{checkpoint}"], "", "is the program"),
        (["bash", "-c", "train.py --resume {checkpoint}"], "", "argument of its own"),
        (["train.py", "{checkpoint}"], "hf", "--for hf"),
    ],
)
def test_what_could_not_be_left_out_is_refused(command: list[str], trainer: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_command(command, trainer)
    assert why in f"{refused.value} {refused.value.hint}"


def test_the_variable_is_set_only_where_there_is_a_checkpoint() -> None:
    before = {"A": "b", RESUME_FROM: "of an earlier attempt"}
    assert environment_for(before, RESUMED) == {"A": "b", RESUME_FROM: PATH}
    assert environment_for(before, None) == {"A": "b"}


@pytest.mark.parametrize(
    ("command", "nnodes", "is_right"),
    [
        ("torchrun --nnodes 2 train.py", 2, True),
        ("torchrun --nnodes 2 train.py", 1, False),
        ("torchrun --nnodes=2 train.py", 1, False),
        ("torchrun --nnodes=1:4 train.py", 1, True),
        ("accelerate launch --num_machines 3 train.py", 2, False),
        ("deepspeed --num_nodes=2 train.py", 2, True),
        ("python train.py --nnodes", 1, True),
    ],
)
def test_a_launcher_of_other_nodes_is_refused(command: str, nnodes: int, *, is_right: bool) -> None:
    with contextlib.nullcontext() if is_right else pytest.raises(ConfigError, match="nodes"):
        check_nodes_of_command(command.split(), nnodes)
