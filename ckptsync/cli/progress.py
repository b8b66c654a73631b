"""``--progress json``: what a program reads that starts a long command, as a head does.

On stdout come lines ``{"done": n, "total": n}`` in bytes (a total of 0 is not known), one a second
while the work moves, then one line with what the command prints with ``--json``, or its error.  The
log is on stderr.  With ``-c`` the command logs as the configuration says, and takes the share of
its limits that one child of a head has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from ckptsync.cli import output
from ckptsync.cli.output import Progress, describe_error
from ckptsync.errors import CkptsyncError
from ckptsync.threads import HINT, start_thread

BEAT = 1.0  # seconds between two checks for progress

log = logging.getLogger(__name__)


def add_progress(command: argparse.ArgumentParser) -> None:
    """Add ``--progress``."""
    command.add_argument(
        "--progress",
        choices=("json",),
        help="for programs: print the bytes that are done each second, then the result, as lines of"
        " JSON on stdout",
    )


def with_progress(
    args: argparse.Namespace,
    command: Callable[[argparse.Namespace, Progress], int],
    what: str = "",
    kept: str = "",
) -> int:
    """Run a command and return its exit code; print as ``--progress`` says.

    Without that, people see how far ``what`` is (see `output.progress`).
    """
    if not args.progress:
        if not what:
            return command(args, lambda _done, _total: None)
        with output.progress(args, what, kept) as progress:
            return command(args, progress)
    args.json, stdout, printed = True, sys.stdout, io.StringIO()
    try:
        if args.config:
            from ckptsync.config.loading import load
            from ckptsync.service.log import configure

            args.loaded = load(Path(args.config))
            configure(args.loaded.log)
        with contextlib.redirect_stdout(printed), _beats(stdout) as progress:
            code = command(args, progress)
    except (CkptsyncError, MemoryError) as e:
        out_of_memory = CkptsyncError("there is not enough memory", hint=HINT)
        error = e if isinstance(e, CkptsyncError) else out_of_memory
        output.print_json(describe_error(error))
        return error.exit_code
    except OSError:  # `main` says what that is
        raise
    except Exception:
        log.critical("%s", args.command.__module__, exc_info=True)
        return CkptsyncError.exit_code
    print(printed.getvalue().rstrip("\n").rpartition("\n")[2], flush=True)
    return code


@contextlib.contextmanager
def _beats(stdout: TextIO) -> Iterator[Progress]:
    """Within the block, print a line each second in which there was progress.

    Give the function that takes down how far the work is.
    """
    from ckptsync.service.tasks import progress_of_process

    position, over = (0, 0), threading.Event()

    def note(done: int, total: int) -> None:
        nonlocal position
        position = done, total

    def beat() -> None:
        before, sent = progress_of_process(), position
        while not over.wait(BEAT):
            now, at = progress_of_process(), position
            if at != sent or now.is_beyond(before):
                with contextlib.suppress(OSError, ValueError):  # nobody reads it
                    stdout.write(json.dumps({"done": at[0], "total": at[1]}) + "\n")
                    stdout.flush()
                before, sent = now, at

    thread = start_thread(beat, "beat")
    try:
        yield note
    finally:
        over.set()
        thread.join(BEAT)
