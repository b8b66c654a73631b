"""What campaigns share: options, a work directory, programs that end with them, the verdict."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def arguments(description: str | None, *shared: str) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring, with these of the shared options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options: dict[str, dict[str, Any]] = {
        "seed": {"type": int, "default": 1},
        "home": {"help": "a directory to work in, kept afterwards; a temporary one by default"},
        "calls": {
            "type": int,
            "default": 0,
            "help": "die at most at so many system calls, drawn by chance; 0: at every one",
        },
    }
    for name in shared:
        parser.add_argument(f"--{name}", **options[name])
    return parser


@contextlib.contextmanager
def working(name: str, home: str | None = None) -> Iterator[Path]:
    """Yield the directory ``home``, or a temporary one."""
    with contextlib.ExitStack() as stack:
        yield Path(
            home or stack.enter_context(tempfile.TemporaryDirectory(prefix=f"ckptsync-{name}-"))
        )


def verdict(wrong: Iterable[str]) -> int:
    """Print each broken promise; return the exit code, 0 if there is none."""
    lines = list(wrong)
    for line in lines:
        print(f"VIOLATED {line}", flush=True)
    return 1 if lines else 0


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a program in a session of its own; in the end all of that session is killed."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            kill_session(process)


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a program that `started` has started, and all of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
