"""``--progress json``: report progress and the result of a long command to a program.

A head starts long commands as children, and must see that they move.  On stdout it reads lines
``{"done": n, "total": n}`` in bytes (a total of 0 is not known), one a second while the work moves,
then one line with what the command prints with ``--json``, or its error.  The log is on stderr.
With ``-c`` the command logs as the configuration says, and takes one child's share of its limits.
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
    """Define ``--progress``."""
    command.add_argument(
        "--progress",
        choices=("json",),
        help="for programs: print the bytes that are done each second, then the result, as lines of"
        " JSON on stdout",
    )


def with_progress(
    args: argparse.Namespace,
    command: Callable[[argparse.Namespace, Progress], int],
    label: str = "",
    kept_text: str = "",
) -> int:
    """Run a command, and return its exit code; report as ``--progress`` says.

    Without that option, show progress for people if there is a ``label`` (see `output.progress`),
    and let errors pass.  With it, set ``args.json`` (and ``args.loaded``, and the logger, with
    ``-c``), and print only the last line that the command printed.  A CkptsyncError or MemoryError
    is printed and its code returned; OSError is raised; any other Exception is logged, and 1
    returned.
    """
    if not args.progress:
        if not label:
            return command(args, lambda _done, _total: None)
        with output.progress(args, label, kept_text) as progress:
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
    except OSError:  # `main` prints it
        raise
    except Exception:
        log.critical("%s", args.command.__module__, exc_info=True)
        return CkptsyncError.exit_code
    print(printed.getvalue().rstrip("\n").rpartition("\n")[2], flush=True)
    return code


@contextlib.contextmanager
def _beats(stdout: TextIO) -> Iterator[Progress]:
    """Within the block, print a line for each `BEAT` seconds in which there was progress.

    Give the function that gets the bytes done and in all.  A thread prints; it also counts CPU time
    and I/O of the process as progress.
    """
    from ckptsync.service.tasks import progress_of_process

    position, is_over = (0, 0), threading.Event()

    def report(done: int, total: int) -> None:
        """Remember how far the work is."""
        nonlocal position
        position = done, total

    def beat() -> None:
        """Print the position until the block ends, whenever it or the process has moved."""
        last_signs, printed = progress_of_process(), position
        while not is_over.wait(BEAT):
            signs, current = progress_of_process(), position
            if current != printed or signs.is_beyond(last_signs):
                with contextlib.suppress(OSError, ValueError):  # the reader has ended
                    stdout.write(json.dumps({"done": current[0], "total": current[1]}) + "\n")
                    stdout.flush()
                last_signs, printed = signs, current

    thread = start_thread(beat, "beat")
    try:
        yield report
    finally:
        is_over.set()
        thread.join(BEAT)
