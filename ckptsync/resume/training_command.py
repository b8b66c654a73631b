"""The arguments of a training's command, with or without a checkpoint to resume from.  Pure.

`{checkpoint}` and `{step}` in COMMAND stand for what was agreed on.  With nothing to resume from,
the arguments that name it are left out, so that one command line serves the first start and all
later ones.
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
    """Raise ConfigError for a command whose placeholders could not be replaced or left out."""
    if not command:
        hint = "give it after `--`: `ckptsync resume OUT --store URL -- torchrun train.py`"
        raise ConfigError("resume: no command to run", hint=hint)
    named = [word for word in command if _has_placeholder(word)]
    if named and trainer:
        why = f"--for {trainer} appends what the trainer needs, and COMMAND has {named[0]}, too"
        raise ConfigError(why, hint="leave one of both out")
    if _has_placeholder(command[0]):
        raise ConfigError(f"{command[0]}: is the program, and no argument of it")
    if script := next((word for word in named if re.search(r"\s", word)), ""):
        why = f"{_shortened(script)}: a placeholder within a longer text cannot be left out"
        hint = (
            f"make it an argument of its own, or read ${RESUME_FROM} in the script:"
            f' ${{{RESUME_FROM}:+--resume_from_checkpoint "${RESUME_FROM}"}}'
        )
        raise ConfigError(why, hint=hint)


def check_nodes_of_command(command: Sequence[str], nnodes: int) -> None:
    """Raise ConfigError where a launcher is told of another number of nodes than ``nnodes``.

    Each node would choose a checkpoint for itself.
    """
    for word, after in zip(command, [*command[1:], ""], strict=True):
        match = _NODES.fullmatch(word)
        count = (match[1] if match[1] is not None else after) if match else ""
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
    """Return the training's environment: `RESUME_FROM` is set, or not there."""
    others = {name: value for name, value in environment.items() if name != RESUME_FROM}
    return {**others, RESUME_FROM: resumed.path} if resumed else others


def _has_placeholder(word: str) -> bool:
    return CHECKPOINT in word or STEP in word


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"


def _is_flag(words: Sequence[str]) -> bool:
    """Return whether the last word is a flag without a value."""
    return words[-1].startswith("-") and "=" not in words[-1] and words[-1].strip("-") != ""


def _replaced(word: str, values: Mapping[str, str | None]) -> str:
    """Return a word with the placeholders' values, each of which is put in as it is."""
    pattern = "|".join(map(re.escape, values))
    return re.sub(pattern, lambda match: values[match[0]] or "", word)


# What each trainer wants.


def _for_llamafactory(words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """An override after a configuration file, else a flag, as its `read_args` tells them apart."""
    if resumed is None:
        return []
    has_config = any(
        word.endswith(_CONFIGS) and not _is_flag(words[:at])
        for at, word in enumerate(words)
        if at > 0
    )
    key = "resume_from_checkpoint"
    return [f"{key}={resumed.path}"] if has_config else [f"--{key}", resumed.path]


def _for_hf(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    return ["--resume_from_checkpoint", resumed.path] if resumed else []


def _for_torchtitan(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """A step of its own checkpoint folder; without one it takes the newest, if there is any."""
    is_numbered = resumed is not None and resumed.step is not None
    return ["--checkpoint.load_step", str(resumed.step)] if resumed and is_numbered else []


def _for_verl(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    """Overrides of Hydra, in which an unusual path is quoted."""
    if resumed is None:
        return ["trainer.resume_mode=disable"]
    path = resumed.path
    if not _PLAIN_IN_HYDRA.fullmatch(path):
        escaped = path.replace("'", "\\'")
        path = f"'{escaped}'"
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]


def _for_lightning(_words: Sequence[str], resumed: Resumed | None) -> list[str]:
    return ["--ckpt_path", resumed.path] if resumed else []


TRAINERS: Mapping[str, Callable[[Sequence[str], Resumed | None], list[str]]] = {
    "hf": _for_hf,
    "lightning": _for_lightning,
    "llamafactory": _for_llamafactory,
    "torchtitan": _for_torchtitan,
    "verl": _for_verl,
}
"""By `--for`: the arguments that a trainer gets.

DeepSpeed has none of its own: each script reads its own arguments, and gives
``load_checkpoint(directory, tag)`` the two parts of the path.
"""
