"""Make the command and environment of a training, with or without a checkpoint to resume from.

One command line must serve the first start of a training and all later ones.  `{checkpoint}` and
`{step}` in the command stand for the checkpoint that was agreed on.  Where there is none, the
arguments that contain them are left out.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptsync.errors import ConfigError

CHECKPOINT, STEP = "{checkpoint}", "{step}"
RESUME_FROM = "CKPTSYNC_RESUME_FROM"
"""The variable that names the checkpoint to the training; not set where there is none."""
_PLAIN_IN_HYDRA = re.compile(r"[A-Za-z0-9_/.:%+@-]+")
_NODES = re.compile(r"--(?:nnodes|num[-_]machines|num[-_]nodes)(?:=(.*))?")
_CONFIGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Resumed:
    """The path of the checkpoint that a training resumes from, and its step if the name has one."""

    path: str
    step: int | None


def check_command(command: Sequence[str], trainer: str = "") -> None:
    """Raise ConfigError for a command whose placeholders could not be replaced or left out.

    Also raise it if the command is empty, or has a placeholder although ``trainer`` (a key of
    `TRAINERS`) adds its own arguments.
    """
    if not command:
        hint = "give it after `--`: `ckptsync resume OUT --store URL -- torchrun train.py`"
        raise ConfigError("resume: no command to run", hint=hint)
    with_placeholder = [word for word in command if _has_placeholder(word)]
    if with_placeholder and trainer:
        both = f"appends what the trainer needs, and COMMAND has {with_placeholder[0]}, too"
        raise ConfigError(f"--for {trainer} {both}", hint="leave one of both out")
    if _has_placeholder(command[0]):
        raise ConfigError(f"{command[0]}: is the program, and no argument of it")
    if script := next((word for word in with_placeholder if re.search(r"\s", word)), ""):
        why = f"{_shortened(script)}: a placeholder within a longer text cannot be left out"
        hint = (
            f"make it an argument of its own, or read ${RESUME_FROM} in the script:"
            f' ${{{RESUME_FROM}:+--resume_from_checkpoint "${RESUME_FROM}"}}'
        )
        raise ConfigError(why, hint=hint)


def check_nodes_of_command(command: Sequence[str], nnodes: int) -> None:
    """Raise ConfigError if an option of the launcher gives another number of nodes than ``nnodes``.

    With two numbers, each node would choose a checkpoint for itself.
    """
    for word, next_word in zip(command, [*command[1:], ""], strict=True):
        match = _NODES.fullmatch(word)
        count = (match[1] if match[1] is not None else next_word) if match else ""
        if count.isascii() and count.isdecimal() and int(count) != nnodes:
            raise ConfigError(
                f"{word}: the training is to run on {count} nodes, and this attempt has {nnodes}",
                hint=f"say it before the `--`, too: --nnodes {count} --attempt NAME",
            )


def command_for(command: Sequence[str], resumed: Resumed | None, trainer: str = "") -> list[str]:
    """Return the command to run.

    Arguments with a placeholder that has no value are left out, and with them a flag that stands
    before such a value (``--resume_from_checkpoint {checkpoint}``), but not one before
    ``key={checkpoint}``.  All other braces stay.  ``trainer``: a key of `TRAINERS`, whose own
    arguments are appended.
    """
    values = {
        CHECKPOINT: resumed.path if resumed else None,
        STEP: str(resumed.step) if resumed and resumed.step is not None else None,
    }
    words: list[str] = []
    for word in command:
        if any(value is None and name in word for name, value in values.items()):
            if "=" not in word and not word.startswith("-") and len(words) > 1 and _is_flag(words):
                words.pop()
            continue
        words.append(_replaced(word, values))
    return [*words, *(TRAINERS[trainer](words, resumed) if trainer else ())]


def environment_for(environment: Mapping[str, str], resumed: Resumed | None) -> dict[str, str]:
    """Return the training's environment; `RESUME_FROM` is set only where there is a checkpoint."""
    without_resume = {name: value for name, value in environment.items() if name != RESUME_FROM}
    return {**without_resume, RESUME_FROM: resumed.path} if resumed else without_resume


def _has_placeholder(word: str) -> bool:
    """Return whether a word contains a placeholder for the checkpoint or its step."""
    return CHECKPOINT in word or STEP in word


def _shortened(text: str) -> str:
    """Return a text, cut at 60 characters."""
    return text if len(text) <= 60 else text[:60] + "…"


def _is_flag(words: Sequence[str]) -> bool:
    """Return whether the last word is a flag without a value."""
    return words[-1].startswith("-") and "=" not in words[-1] and words[-1].strip("-") != ""


def _replaced(word: str, values_by_placeholder: Mapping[str, str | None]) -> str:
    """Return a word with its placeholders replaced; a value is inserted without quoting."""
    pattern = "|".join(map(re.escape, values_by_placeholder))
    return re.sub(pattern, lambda match: values_by_placeholder[match[0]] or "", word)


def _for_llamafactory(words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """Return an override if a word names a configuration file, else a flag with its value.

    Empty without a checkpoint.  LLaMA-Factory's `read_args` tells the two kinds of command lines
    apart in the same way.
    """
    if resumed is None:
        return []
    has_config = any(
        word.endswith(_CONFIGS) and not _is_flag(words[:index])
        for index, word in enumerate(words)
        if index > 0
    )
    key = "resume_from_checkpoint"
    return [f"{key}={resumed.path}"] if has_config else [f"--{key}", resumed.path]


def _for_hf(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """Return the Trainer's option; none without a checkpoint."""
    return ["--resume_from_checkpoint", resumed.path] if resumed else []


def _for_torchtitan(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """Return the option with the step to load; empty without a checkpoint, or a step in its name.

    Without the option torchtitan loads the newest step of its own folder, if there is any.
    """
    is_numbered = resumed is not None and resumed.step is not None
    return ["--checkpoint.load_step", str(resumed.step)] if resumed and is_numbered else []


def _for_verl(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """Return Hydra's overrides, with a path of special characters quoted.

    Without a checkpoint they disable verl's own search for one.
    """
    if resumed is None:
        return ["trainer.resume_mode=disable"]
    path = resumed.path
    if not _PLAIN_IN_HYDRA.fullmatch(path):
        escaped = path.replace("'", "\\'")
        path = f"'{escaped}'"
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]


def _for_lightning(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """Return LightningCLI's option; none without a checkpoint."""
    return ["--ckpt_path", resumed.path] if resumed else []


TRAINERS: Mapping[str, Callable[[Sequence[str], Resumed | None], list[str]]] = {
    "hf": _for_hf,
    "lightning": _for_lightning,
    "llamafactory": _for_llamafactory,
    "torchtitan": _for_torchtitan,
    "verl": _for_verl,
}
"""For each value of ``--for``, the function that returns the arguments to append for its trainer.

DeepSpeed is missing: each script has arguments of its own, and passes the two parts of the path to
``load_checkpoint(directory, tag)``.
"""
