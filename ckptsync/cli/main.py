"""``main``: parse the arguments, run the command, turn an error into a message and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Protocol, cast

from ckptsync import __version__
from ckptsync.cli.arguments import EXIT_CODES, Parser, add_command
from ckptsync.cli.output import print_error
from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.quantities import clean
from ckptsync.stores import progress_signs
from ckptsync.threads import HINT, SCARCE, refusal

INTERRUPTED = 130
BROKEN_PIPE = 141
_ALGEBRA = "OPENBLAS_NUM_THREADS"
COMMANDS: Mapping[str, str] = {
    "demo": "run a demo on this machine: two nodes, a head, a flipped bit, and its repair",
    "run": "run the service with the roles of its configuration (worker, head, verifier)",
    "push": "upload one checkpoint, or every checkpoint of a directory, now",
    "merge": "merge a sharded checkpoint into safetensors; needs no service",
    "verify": "read a store, or a checkpoint in a directory, and check every byte",
    "inspect": "show which layouts a checkpoint has, whether it is complete, and its tensors",
    "ls": "list the runs and checkpoints of a store with their status",
    "status": "show what the nodes and heads of a store do, and what is wrong",
    "pull": "download a checkpoint, so that a training can resume from it",
    "consolidate": "merge what is complete in a store and has no model yet, as a head does",
    "gc": "delete checkpoints that no retention rule keeps",
    "keep": "keep a checkpoint, whatever the retention rules say",
    "join": "declare that two locations of a checkpoint are one save, and bring their files"
    " together",
    "repair": "repair damaged checkpoints, or say why that is not possible",
    "config": "print an example of a configuration",
    "help": "print a page of the documents",
    "hook": "let CKPTSYNC_AUTOLOAD=1 give each Hugging Face Trainer the hook: install, uninstall",
    "service": "install or uninstall systemd's unit for this machine's configuration",
    "doctor": "find what would make a training hang or lose files, before it starts",
}
"""Each command, and what it does.

Its module in this package has the same name, and is imported only when it is called.
"""


class Command(Protocol):
    """A command's module.

    If it has a string ``DETAILS``, that follows the summary in its help.
    """

    def add_arguments(self, command: argparse.ArgumentParser) -> None:
        """Define the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command, and return its exit code."""
        ...


_OUT_OF_MEMORY = CkptsyncError("there is not enough memory", hint=HINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    What is no `CkptsyncError` escapes with its traceback (exit code 1).
    """
    if "CKPTSYNC_PARENT" in os.environ:  # a head has started it
        from ckptsync.child import die_with_parent

        die_with_parent()
    words = sys.argv[1:] if argv is None else argv
    try:
        of_command = parser(next((word for word in words if not word.startswith("-")), ""))
    except (MemoryError, ImportError) as e:  # a library's, where there is no room to load it
        if isinstance(e, ImportError) and "failed to map" not in str(e):
            raise
        print_error(_OUT_OF_MEMORY)
        return _OUT_OF_MEMORY.exit_code
    args = of_command.parse_args(words)
    handler = logging.StreamHandler()  # a service chooses its format later
    handler.setFormatter(_Clean("ckptsync: %(message)s"))
    logging.basicConfig(handlers=[handler])
    return bounded(lambda: int(args.command(args)), as_json=args.json)


def parser(command: str = "") -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with the arguments of ``command`` alone.

    No other command's module is imported.
    """
    top = argparse.ArgumentParser(
        prog="ckptsync",
        description="Collects every finished checkpoint from all your nodes, merges the shards into"
        " safetensors, and verifies every byte.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.set_defaults(json=False)
    top.add_argument("--version", action="version", version=f"ckptsync {__version__}")
    commands = top.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, summary in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=summary)
            continue
        chosen = _imported(f"ckptsync.cli.{name}")
        one = add_command(commands, name, summary, getattr(chosen, "DETAILS", ""))
        one.set_defaults(command=chosen.run)
        chosen.add_arguments(one)
    return top


class _Clean(logging.Formatter):
    """Formats log lines so that names and errors from a store cannot command the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its base calls it so
        return clean(super().formatMessage(record))


def _imported(command: str) -> Command:
    """Return the module of a command, and import numpy where the module needs it.

    OpenBLAS would start a thread for each core, which wait for work by spinning: more CPU than all
    else at the start, and never any work here. The variable is taken away again, as other programs
    that are started from here would inherit it.
    """
    # a program that calls `main` again: what it has by now may become garbage
    if command in sys.modules:
        return cast("Command", sys.modules[command])
    is_set = _ALGEBRA in os.environ
    os.environ.setdefault(_ALGEBRA, "1")
    gc.disable()  # what is imported stays: looking through it for garbage takes a tenth of the time
    try:
        return cast("Command", import_module(command))
    finally:
        gc.freeze()
        gc.enable()
        if not is_set:
            del os.environ[_ALGEBRA]


def bounded(command: Callable[[], int], *, as_json: bool = False) -> int:
    """Run a command; return its exit code, or that of the error, which is printed."""
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
        # the reader of our output has left; stdout must not be flushed into the pipe once more at
        # exit
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
    """SIGTERM unwinds the stack as ^C does, so that unfinished output is removed.

    With either nothing is tried again.
    """
    progress_signs.clear_shutdown()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _frame: object) -> None:
        progress_signs.announce_shutdown()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = [signal.SIGTERM]
    # else ^C is not for us, as in the background
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
