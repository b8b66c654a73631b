"""Run the command line: parse arguments, import and run one command, turn errors into exit codes.

Most time of a short command is imports, so only the module of the called command is imported.  A
command raises errors; only this module catches them, prints them with their hint, and chooses the
exit code, also for signals, a closed pipe and a full memory.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import io
import logging
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Protocol, cast

from ckptsync.cli.arguments import Parser, add_json, parser_options
from ckptsync.cli.commands import COMMANDS, EXIT_CODES, GROUPS
from ckptsync.cli.output import print_error
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.near_names import did_you_mean
from ckptsync.quantities import clean
from ckptsync.stores import progress_signs
from ckptsync.threads import HINT, SCARCE, refusal

INTERRUPTED = 130
BROKEN_PIPE = 141
_ALGEBRA = "OPENBLAS_NUM_THREADS"


class Command(Protocol):
    """The module of a command.

    A module may have a string ``DETAILS``, which follows the summary in its help, and one
    ``NOTES``, whose paragraphs follow the options.
    """

    def add_arguments(self, command: argparse.ArgumentParser) -> None:
        """Define the command's arguments on its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command, print its result, and return its exit code.  Raises CkptsyncError."""
        ...


_ABOUT = (
    "Collects every finished checkpoint from all your nodes, merges the shards into safetensors,"
    " and verifies every byte."
)
_OUT_OF_MEMORY = CkptsyncError("there is not enough memory", hint=HINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    ``argv``: the words after the program's name, by default the process's.  A `CkptsyncError` or a
    lack of memory is printed; an interrupt is not.  Any other exception is raised, with its
    traceback (exit code 1).  Sets up the root logger.  If a head started this process
    (CKPTSYNC_PARENT), it ends when the head does.
    """
    if "CKPTSYNC_PARENT" in os.environ:  # a head has started it
        from ckptsync.child import die_with_parent

        die_with_parent()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    words = [*(sys.argv[1:] if argv is None else argv)]
    # words after `--` are a training's
    own_words = words[: words.index("--")] if "--" in words else words
    as_json = any(word.partition("=")[0] in ("--json", "--progress") for word in own_words)
    try:
        if words[:1] in (["-h"], ["--help"]):
            print(overview(), end="")
            return 0
        if words == ["--version"]:
            words = ["version"]
        command = parser(words[0] if words else "")
        args = command.parse_args(words[1:])
        args.words = words
    except ConfigError as e:
        print_error(e, as_json=as_json)
        return e.exit_code
    except (MemoryError, ImportError) as e:  # there may be no memory to load a library
        if isinstance(e, ImportError) and "failed to map" not in str(e):
            raise
        print_error(_OUT_OF_MEMORY, as_json=as_json)
        return _OUT_OF_MEMORY.exit_code
    handler = logging.StreamHandler()  # a service chooses its format later
    handler.setFormatter(_Clean("ckptsync: %(message)s"))
    logging.basicConfig(handlers=[handler])
    return bounded(lambda: int(args.command(args)), as_json=as_json)


def overview() -> str:
    """Return the text of ``ckptsync --help``: the commands by purpose."""
    lines = ["usage: ckptsync COMMAND …", "", *textwrap.wrap(_ABOUT, 80)]
    for purpose, commands in GROUPS.items():
        lines += ["", f"{purpose}:"]
        lines += [f"  {name:<12} {entry.summary}" for name, entry in commands.items()]
    lines += [
        "",
        "The store is --store URL, else that of -c FILE, else $CKPTSYNC_STORE.",
        "`ckptsync help COMMAND` shows a command's arguments and examples; `ckptsync help` lists",
        "the documents; `ckptsync help exit-codes` says what exit codes mean.",
    ]
    return "\n".join([*lines, ""])


def parser(command: str) -> Parser:
    """Return the parser of a command, and import its module, but no other command's.

    Its namespace has ``command``, the module's `run`.  Raises ConfigError if there is no such
    command.
    """
    if command not in COMMANDS:
        hint = "`ckptsync --help` lists the commands"
        if not command:
            why = "no command is given"
        elif command.startswith("-"):
            why = f"{command}: an option comes after its command"
        else:
            why, hint = f"{command}: no such command", did_you_mean(command, COMMANDS) or hint
        raise ConfigError(why, hint=hint)
    entry, module = COMMANDS[command], _imported(f"ckptsync.cli.{command}")
    notes = [
        textwrap.fill(note, 80, initial_indent="  - ", subsequent_indent="    ")
        for note in getattr(module, "NOTES", "").split("\n\n")
        if note
    ]
    lines = ["notes:", *notes, ""] if notes else []
    lines += ["examples:", *(f"  ckptsync {line}" for line in entry.examples)]
    parser_kwargs = parser_options(entry.summary, getattr(module, "DETAILS", ""), "\n".join(lines))
    command_parser = Parser(f"ckptsync {command}", **parser_kwargs)
    add_json(command_parser)
    command_parser.set_defaults(json=False, command=module.run)
    module.add_arguments(command_parser)
    return command_parser


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, for completion and man pages."""
    top = argparse.ArgumentParser(
        "ckptsync",
        description=_ABOUT,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, entry in COMMANDS.items():
        command_parser = parser(name)
        commands.add_parser(name, help=entry.summary)
        commands.choices[name] = command_parser
    return top


class _Clean(logging.Formatter):
    """Formats log lines so that names and errors from a store cannot command the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its base calls it so
        """Return the formatted message without control characters."""
        return clean(super().formatMessage(record))


def _imported(command: str) -> Command:
    """Return a command's module, imported with one thread for numpy's OpenBLAS.

    OpenBLAS would start a thread for each core, which spin without work and take more CPU than all
    other imports.  The variable is removed afterwards, as child processes would inherit it.  The
    garbage collector is off meanwhile, and never scans the imported modules later.
    """
    # `main` was called again: do not freeze the garbage of the program that calls it
    if command in sys.modules:
        return cast("Command", sys.modules[command])
    is_set = _ALGEBRA in os.environ
    os.environ.setdefault(_ALGEBRA, "1")
    gc.disable()  # scanning imported modules for garbage takes a tenth of the time
    try:
        return cast("Command", import_module(command))
    finally:
        gc.freeze()
        gc.enable()
        if not is_set:
            del os.environ[_ALGEBRA]


def bounded(command: Callable[[], int], *, as_json: bool = False) -> int:
    """Run a command; return its exit code, or that of its error, after printing that.

    Errors of memory, disk (those with an errno) and threads become a `CkptsyncError`; any other
    exception, and SIGTERM's SystemExit, is raised.  ^C returns `INTERRUPTED`, a closed pipe
    `BROKEN_PIPE` with stdout changed to /dev/null; nothing is printed.
    """
    try:
        with _terminated_like_interrupted():
            code = command()
            sys.stdout.flush()
            return code
    except CkptsyncError as e:
        error = e
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of stdout has ended: Python must not flush into the pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except MemoryError:
        error = _OUT_OF_MEMORY
    except RuntimeError as e:
        if SCARCE not in str(e):
            raise
        error = refusal("ckptsync")
    except OSError as e:
        if e.errno is None:
            raise
        where = f"{e.filename}: " if e.filename else ""
        error = StoreError(
            f"{where}{e.strerror or e}", hint="check that disk or path, then try again"
        )
        if e.errno in (errno.EAGAIN, errno.ENOMEM):
            error = CkptsyncError(f"{where}{e.strerror}", hint=HINT)
    print_error(error, as_json=as_json)
    return error.exit_code


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within the block, let SIGTERM raise SystemExit, as ^C raises KeyboardInterrupt.

    So unfinished output is removed; and with either signal no failed call is tried again.  Outside
    the main thread, signals stay as they are.
    """
    progress_signs.clear_shutdown()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _frame: object) -> None:
        """Announce the end, and raise KeyboardInterrupt for SIGINT, else SystemExit."""
        progress_signs.announce_shutdown()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = [signal.SIGTERM]
    # any other handler: ^C is ignored, as for a process in the background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
