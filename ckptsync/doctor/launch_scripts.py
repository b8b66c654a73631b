"""What a shell script that launches a training says: options of the training, and files it names.

Nothing is run.  Variables that the script sets, or that the environment has, are put in; of others,
and of commands in ``$(…)``, the ``$`` stays, so that a reader knows that a shell decides.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub", ".job")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?:\[[@*]\])?(?::?-([^{}]*))?\})"
)
_OPTION = re.compile(r"(?:--|\+\+?)?([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)
_CONFIGURATION = (".yaml", ".yml", ".json")
# what trainers call the directory in which their checkpoints lie: torchtitan, verl, Lightning,
# Megatron
_OUTPUT_DIR = {
    "job.dump_folder",
    "dump_folder",
    "trainer.default_local_dir",
    "trainer.default_root_dir",
    "save",
}


@dataclass(slots=True)
class LaunchScript:
    """``options``: the last value of each; ``files``: configurations that it names, in order."""

    options: dict[str, str] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)


def is_script(name: str, text: str) -> bool:
    """Return whether a file is a shell script, by its name or its first line."""
    first = text.partition("\n")[0]
    return name.endswith(_SUFFIXES) or (first.startswith("#!") and "sh" in first)


def read_script(text: str, environment: Mapping[str, str]) -> LaunchScript:
    """Return what a script says; of a command in several lines all."""
    found, variables, home = LaunchScript(), dict(environment), ""
    words = _words(text, variables)
    word, following = next(words, None), next(words, None)
    while word is not None:
        has_value = following is not None and not following.startswith("-")
        if given := _OPTION.fullmatch(word):
            _note(found, given[1], given[2], home)
        elif word.startswith("--") and has_value:
            _note(found, word[2:], following or "", home)
        elif word == "cd" and has_value:
            home = os.path.join(home, os.path.expanduser(following or ""))  # noqa: PTH111, PTH118 - texts, which name nothing yet
        if word.endswith(_CONFIGURATION):
            found.files[_below(home, word)] = None
        word, following = following, next(words, None)
    return found


def _note(found: LaunchScript, option: str, value: str, home: str) -> None:
    name = option.replace("-", "_")
    name = "output_dir" if name in _OUTPUT_DIR else name
    if name == "output_dir":
        value = _below(home, value)
    found.options[name] = value
    if value.endswith(_CONFIGURATION):
        found.files[_below(home, value)] = None


def _below(home: str, path: str) -> str:
    """Return a path as the script means it where it has gone to a directory."""
    return path if path.startswith("$") else os.path.join(home, os.path.expanduser(path))  # noqa: PTH111, PTH118 - texts


def _words(text: str, variables: dict[str, str]) -> Iterator[str]:
    """Yield the words of all commands; assignments set ``variables``, and are yielded, too."""
    for line in text.replace("\\\n", " ").splitlines():
        yield from _words_of(line, variables, depth=0)


def _words_of(line: str, variables: dict[str, str], depth: int) -> Iterator[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation of several lines
        words = line.replace('"', " ").replace("'", " ").split()
    for word in words:
        value = _expanded(word, variables)
        given = _ASSIGNED.fullmatch(value)
        if given and value.endswith("$"):  # of a command, which the lexer has cut off
            variables.pop(given[1], None)
        elif given:
            variables[given[1]] = given[2]
        # several words in a variable, or in `bash -c '…'`
        if depth == 0 and " " in value and " --" in f" {value}" and not given:
            yield from _words_of(value, variables, depth=1)
        else:
            yield value


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        return variables.get(name, match[0] if default is None else default)

    return _VARIABLE.sub(value, word)
