"""Read a training's options and configuration files from the shell script that launches it.

Nothing is run: the script is split into words, and variables that it sets, or that the environment
has, are replaced by their values.  Other variables, and commands in ``$(…)``, keep their ``$``, by
which a reader sees that only a shell knows the value.
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
    """A script's ``options``, with their last values, and its configuration ``files``, in order."""

    options: dict[str, str] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)


def is_script(name: str, text: str) -> bool:
    """Return whether a file is a shell script, by its suffix, or ``#!`` and ``sh`` in line 1."""
    first = text.partition("\n")[0]
    return name.endswith(_SUFFIXES) or (first.startswith("#!") and "sh" in first)


def read_script(text: str, environment: Mapping[str, str]) -> LaunchScript:
    """Return the options and configuration files in all commands of a script, which is not run.

    An option is ``name=value``, ``--name=value``, ``++name=value`` or ``--name value``; the last of
    a name counts.  Files are words or values that end with `_CONFIGURATION`.  `cd` counts.
    """
    script, variables, home = LaunchScript(), dict(environment), ""
    words = _words(text, variables)
    word, following = next(words, None), next(words, None)
    while word is not None:
        has_value = following is not None and not following.startswith("-")
        if option := _OPTION.fullmatch(word):
            _add_option(script, option[1], option[2], home)
        elif word.startswith("--") and has_value:
            _add_option(script, word[2:], following or "", home)
        elif word == "cd" and has_value:
            home = os.path.join(home, os.path.expanduser(following or ""))  # noqa: PTH111, PTH118 - texts, which name nothing yet
        if word.endswith(_CONFIGURATION):
            script.files[_below(home, word)] = None
        word, following = following, next(words, None)
    return script


def _add_option(script: LaunchScript, option: str, value: str, home: str) -> None:
    """Add an option to ``script``, and a configuration that is its value to the script's files.

    Its name gets ``_`` for ``-``; those of `_OUTPUT_DIR` become ``output_dir``.  ``home``: where
    `cd` has led, to which these paths are relative.
    """
    name = option.replace("-", "_")
    name = "output_dir" if name in _OUTPUT_DIR else name
    if name == "output_dir":
        value = _below(home, value)
    script.options[name] = value
    if value.endswith(_CONFIGURATION):
        script.files[_below(home, value)] = None


def _below(home: str, path: str) -> str:
    """Return a path relative to the directory ``home``; as it is if a shell variable begins it."""
    return path if path.startswith("$") else os.path.join(home, os.path.expanduser(path))  # noqa: PTH111, PTH118 - texts


def _words(text: str, variables: dict[str, str]) -> Iterator[str]:
    """Yield the words of all commands, line by line; assignments set ``variables`` on the way."""
    for line in text.replace("\\\n", " ").splitlines():
        yield from _words_of(line, variables, depth=0)


def _words_of(line: str, variables: dict[str, str], depth: int) -> Iterator[str]:
    """Yield words and operators of a line, variables replaced; assignments change ``variables``.

    Assignments are yielded, too; one of a ``$(…)`` removes the variable.  At depth 0 a word with
    options in it, such as that of ``bash -c '…'``, is split.  If a quotation does not end in this
    line, its quotes count as blanks.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation of several lines
        words = line.replace('"', " ").replace("'", " ").split()
    for word in words:
        value = _expanded(word, variables)
        assignment = _ASSIGNED.fullmatch(value)
        if assignment and value.endswith("$"):  # of a command, which the lexer has cut off
            variables.pop(assignment[1], None)
        elif assignment:
            variables[assignment[1]] = assignment[2]
        # several words in a variable, or in `bash -c '…'`
        if depth == 0 and " " in value and " --" in f" {value}" and not assignment:
            yield from _words_of(value, variables, depth=1)
        else:
            yield value


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """Return a word with variables replaced; unknown ones without a default stay as they are."""

    def value(match: re.Match[str]) -> str:
        """Return the value of one variable."""
        name, default = match[1] or match[2], match[3]
        return variables.get(name, match[0] if default is None else default)

    return _VARIABLE.sub(value, word)
