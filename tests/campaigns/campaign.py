"""What campaigns share: options, directories, stores."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.support.seaweedfs import weed
from tests.support.sshd import sshd

CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("CKPTSYNC_")}
"""The environment without ckptsync's variables."""
CKPTSYNC = (sys.executable, "-m", "ckptsync")


def arguments(description: str | None, *shared: str) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring, with these of the shared options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if "seed" in shared:
        parser.add_argument("--seed", type=int, default=1)
    if "home" in shared:
        home = "a directory to work in, kept afterwards; a temporary one by default"
        parser.add_argument("--home", help=home)
    return parser


def flags(**options: object) -> list[str]:
    """Return ``--name value`` for each option; for True the name alone, for False nothing."""
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


@contextlib.contextmanager
def working(name: str, home: str | None = None, *, in_memory: bool = False) -> Iterator[Path]:
    """Yield the directory ``home``, or a temporary one: in memory, if the system has a place."""
    if home:
        yield Path(home)
        return
    memory = "/dev/shm" if in_memory and Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix=f"ckptsync-{name}-", dir=memory) as directory:
        yield Path(directory)


def new_store(kind: str, home: Path) -> tuple[str, dict[str, Any]]:
    """Return URL and storage options of an empty store: ``posix``, ``sftp`` or ``s3``.

    The first two are the directory ``store`` below ``home``.
    """
    if kind == "s3":
        return f"s3://{weed().bucket()}/store", weed().options()
    if kind == "sftp":
        return sshd().url(home / "store"), dict(sshd().options)
    return str(home / "store"), {}


def verdict(wrong: Iterable[str]) -> int:
    """Print each broken promise; return the exit code, 0 if there is none."""
    lines = list(wrong)
    for line in lines:
        print(f"VIOLATED {line}", flush=True)
    return 1 if lines else 0


def end_by_signal(main: Callable[[], int]) -> None:
    """Run a campaign as a program that SIGTERM ends with all that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
