"""``ckptsync init``: write a short configuration that works, and check it.

A new user needs three values only: the role, the store and the output directories.  They come from
options, or are asked for on a terminal; all other keys keep their defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from pathlib import Path

from ckptsync.cli import doctor, output
from ckptsync.cli.arguments import ask
from ckptsync.errors import ConfigError

ROLES = {
    "worker": "worker",
    "head": "head, verifier",
    "both": "worker, head, verifier",
}
DETAILS = (
    "What is not given is asked for on a terminal. Nothing is overwritten. It ends as `ckptsync"
    " doctor` does, which tries the configuration."
)
_PLAIN = re.compile(r"[A-Za-z/][\w./:*@+=?-]*[\w*/]")  # text that YAML reads as itself


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    add(
        "file",
        metavar="FILE",
        nargs="?",
        default="ckptsync.yaml",
        help="the file to write (default: ckptsync.yaml)",
    )
    add(
        "--role",
        choices=tuple(ROLES),
        help="worker: this machine trains; head: it merges and verifies; both",
    )
    add(
        "--store", metavar="URL", dest="url", help="where checkpoints are gathered: a path or a URL"
    )
    add(
        "--output-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="where trainings write, or a glob of it, of a worker; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Write the file, run the doctor on it, and print the next command.

    The file stays if the doctor finds a fault.  Return the doctor's exit code.  Raises ConfigError
    for a value that is missing or wrong, and for a file that exists.
    """
    from ckptsync.config import loading

    path = Path(args.file)
    if os.path.lexists(path):
        hint = f"`ckptsync config check {shlex.quote(args.file)}` reads it; or name another FILE"
        raise ConfigError(f"{path}: exists already", hint=hint)
    role, url, output_dirs = _choose(args)
    text = text_of(role, url, output_dirs)
    config = loading.read(text, args.file, {})
    _write(path, text)
    examined, code = doctor.examine(path)
    file = shlex.quote(args.file)
    following = [f"ckptsync doctor -c {file}, until it finds no failure"] if code else []
    following.append(f"ckptsync run -c {file}")
    if role == "worker":
        following.append("ckptsync init --role head, on one machine, which merges and verifies")
    if args.json:
        document = {"file": str(path), "text": text, "off": config.switched_off}
        output.print_json(
            {**document, "doctor": doctor.document(examined, code), "next": following}, code
        )
        return code
    from ckptsync.stores.urls import shown_url

    output.say(f"written: {path}: {', '.join(config.roles)}; store {shown_url(config.store.url)}")
    for line in doctor.lines(examined):
        # it names options of doctor, of which `init` has one of the same name
        is_advice = line.startswith("not checked: ")
        output.say(f"{line}: `ckptsync doctor -c {file}` has these options" if is_advice else line)
    for line in config.switched_off:
        output.say(f"note: {line}")
    output.say(f"next: {'; then '.join(following)}")
    return code


def _choose(args: argparse.Namespace) -> tuple[str, str, list[str]]:
    """Return role, store and output directories, from options, else from the terminal.

    Paths are made absolute.  Raises ConfigError for a value that is missing or wrong.
    """
    role = args.role or _ask_role()
    url = args.url or _ask_option(
        "--store", "the store: a directory that all machines reach, or a URL"
    )
    output_dirs = args.output_dir
    if role == "head" and output_dirs:
        raise ConfigError("--output-dir: a head has none", hint="--role both, if it trains, too")
    if role != "head" and not output_dirs:
        question = "output directories of trainings, globs allowed, with spaces between"
        output_dirs = _words(_ask_option("--output-dir", question))
    return role, _absolute(url), [_absolute(each) for each in output_dirs]


def text_of(role: str, url: str, output_dirs: list[str]) -> str:
    """Return the text of the file: the keys without a default for the role, and hints at others."""
    lines = [
        "# All keys and their defaults: `ckptsync help configuration`.",
        f"roles: [{ROLES[role]}]",
        "store:",
        f"  url: {_scalar(url)}",
    ]
    if role != "head":
        lines += ["worker:", "  runs:", *(f"    - path: {_scalar(each)}" for each in output_dirs)]
    if role != "worker":
        lines += ["retention:", "  # keep_last: 5    # nothing is deleted until a rule says so"]
        lines += ["alerts:", "  # urls: []        # nobody is told of damage until one is set"]
    return "\n".join([*lines, ""])


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar, quoted if YAML would read it otherwise."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _absolute(place: str) -> str:
    """Return a path as an absolute one, `~` replaced; a URL as it is.

    Raises ConfigError, also for a path that is not UTF-8.
    """
    from ckptsync.stores.urls import Remote, located

    path_or_url = located(place.strip())
    absolute = place.strip() if isinstance(path_or_url, Remote) else str(path_or_url)
    try:
        absolute.encode()
    except UnicodeEncodeError as e:
        why = f"{absolute}: a path in a configuration must be UTF-8"
        raise ConfigError(why, hint="rename its directories") from e
    return absolute


def _words(answer: str) -> list[str]:
    """Return the words of an answer, split as by a shell.  Raises ConfigError."""
    try:
        return shlex.split(answer)
    except ValueError as e:
        hint = "quote a name with a space or a quote in it, as in a shell"
        raise ConfigError(f"--output-dir: {answer}: {str(e).lower()}", hint=hint) from e


def _ask_role() -> str:
    """Return the role that the user chooses on the terminal; ask again for any other word.

    Raises ConfigError if there is no terminal or no answer.
    """
    while True:
        role = _ask_option("--role", "worker (it trains), head (it merges), or both", "both")
        if role in ROLES:
            return role
        output.say(f"role: {role!r} is none of {', '.join(ROLES)}", to_stderr=True)


def _ask_option(option: str, question: str, default: str = "") -> str:
    """Return the value of an option that the user types on the terminal, or presses Enter for.

    Raises ConfigError if there is no terminal, or no answer and no default.
    """
    refusal = ConfigError(f"{option} is needed where nobody can be asked", hint=question)
    answer = ask(f"{question}{f' [{default}]' if default else ''}: ", refusal)
    if answer == "":
        answer = default
    if not answer:  # ^D is no answer, not even the default
        raise ConfigError(f"{option}: no answer", hint=question)
    return answer


def _write(path: Path, text: str) -> None:
    """Write a new file.  Raises ConfigError, also if it exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror}") from e
