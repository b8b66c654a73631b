"""``main``: the parser's choice is run inside the one boundary that turns an error into words and an exit code."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from ckptsync.cli.arguments import parser
from ckptsync.errors import CkptsyncError, StoreError
from ckptsync.stores import ending
from ckptsync.units import clean

INTERRUPTED = 130
BROKEN_PIPE = 141
_ALGEBRA = "OPENBLAS_NUM_THREADS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code.  Anything but an operator's error escapes with its traceback (and exits 1)."""
    args = parser().parse_args(argv)
    handler = logging.StreamHandler()  # a service says later how it wants to have it
    handler.setFormatter(_Clean("ckptsync: %(message)s"))
    logging.basicConfig(handlers=[handler])
    return bounded(lambda: int(_imported(args.command).run(args)), as_json=args.json)


class _Clean(logging.Formatter):
    """What a server or a file has in its words does not reach the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its base calls it so
        return clean(super().formatMessage(record))


def _imported(command: str) -> Any:
    """The module of a command, with numpy where it needs that.

    OpenBLAS would start a thread for each core, which wait for work by spinning: more CPU than all else at the start, and never any work here.
    The variable is taken away again, as other programs that are started from here would inherit it.
    """
    if command in sys.modules:  # a program that calls `main` again: what it has by now may become garbage
        return sys.modules[command]
    is_told = _ALGEBRA in os.environ
    os.environ.setdefault(_ALGEBRA, "1")
    gc.disable()  # what is imported stays: looking through it for garbage takes a tenth of the time
    try:
        return import_module(command)
    finally:
        gc.freeze()
        gc.enable()
        if not is_told:
            del os.environ[_ALGEBRA]


def bounded(command: Callable[[], int], *, as_json: bool = False) -> int:
    """The error boundary."""
    try:
        with _terminated_like_interrupted():
            code = command()
            sys.stdout.flush()
    except CkptsyncError as e:
        return _say(e, as_json=as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has left, which is their right; stdout must not be flushed into the pipe once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as e:
        if e.errno is None:
            raise
        where = f"{e.filename}: " if e.filename else ""
        return _say(StoreError(f"{where}{e.strerror or e}", hint="look at that disk or path, then try again"), as_json=as_json)
    return code


def _say(error: CkptsyncError, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": str(error), "hint": error.hint, "exit_code": error.exit_code}), file=sys.stderr)
        return error.exit_code
    print(clean(f"ckptsync: error: {error}"), file=sys.stderr)
    if error.hint:
        print(clean(f"ckptsync: hint: {error.hint}"), file=sys.stderr)
    return error.exit_code


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds the stack as ^C does, so that unfinished output is removed; with either nothing is tried again."""
    ending.begin()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _frame: object) -> None:
        ending.announce()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ^C is not for us, as in the background
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
