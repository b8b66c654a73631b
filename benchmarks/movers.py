"""The programs that move files, each as a command line for a directory here and a place there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.places import Place
from benchmarks.tools import is_installed

RUN, CHECKPOINT = "run", "checkpoint-1"
HERE = f"{RUN}/{CHECKPOINT}"
Command = Callable[[Path, Place], list[str]]


@dataclass(frozen=True)
class Mover:
    """``up`` sends the files of a directory, to below `HERE` in the place.

    ``down`` brings them back into a directory that is not there yet, or below it as `CHECKPOINT`.

    ``program`` has to be on the path, or in Python's own directory; ``module`` installed.
    """

    name: str
    up: Command | None
    down: Command | None
    program: str = ""
    module: str = ""

    def missing(self) -> str:
        """What is not installed, in words."""
        if self.program and not found(self.program):
            return f"{self.program} is not installed"
        return (
            f"{self.module} is not installed"
            if self.module and not is_installed(self.module)
            else ""
        )


def found(program: str) -> str | None:
    """Its path."""
    return shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)


def _carry(how: str, direction: str, directory: Path, url: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.carry", how, direction, str(directory), url]


def _pushed(directory: Path, place: Place) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ckptsync",
        "push",
        str(directory),
        "--store",
        place.url,
        "--run",
        RUN,
        "--node",
        "bench",
    ]


def _pulled(directory: Path, place: Place) -> list[str]:
    return [sys.executable, "-m", "ckptsync", "pull", HERE, str(directory), "--store", place.url]


CKPTSYNC = Mover("ckptsync", _pushed, _pulled)
STORE = Mover(
    "ckptsync's store alone",
    lambda d, p: _carry("store", "up", d, p.url),
    lambda d, p: _carry("store", "down", d, p.url),
)
S5CMD = Mover(
    "s5cmd",
    lambda d, p: [found("s5cmd") or "", "cp", f"{d}/", f"{p.below(HERE)}/"],
    lambda d, p: [found("s5cmd") or "", "cp", f"{p.below(HERE)}/*", f"{d}/"],
    "s5cmd",
)
RCLONE = Mover(
    "rclone",
    lambda d, p: ["rclone", "copy", str(d), _rclone(p)],
    lambda d, p: ["rclone", "copy", _rclone(p), str(d)],
    "rclone",
)
BOTO3 = Mover(
    "boto3 upload_file, download_file",
    lambda d, p: _carry("boto3", "up", d, p.below(HERE)),
    lambda d, p: _carry("boto3", "down", d, p.below(HERE)),
    module="boto3",
)
S3FS = Mover(
    "s3fs put, get",
    lambda d, p: _carry("s3fs", "up", d, p.below(HERE)),
    lambda d, p: _carry("s3fs", "down", d, p.below(HERE)),
    module="s3fs",
)
SFTP = Mover(
    "sftp",
    lambda d, p: _sh(
        f"printf '%s\\n' 'mkdir {RUN}' 'put -r {d} {HERE}' | sftp -q -b - {_ssh_host(p)}"
    ),
    lambda d, p: _sh(f"printf '%s\\n' 'get -r {HERE} {d}' | sftp -q -b - {_ssh_host(p)}"),
    "sftp",
)
RSYNC = Mover(
    "rsync over ssh",
    lambda d, p: _sh(
        f"rsync -a --mkpath -e '{' '.join(p.ssh)}' {d}/ {_ssh_host(p, '')}:{p.files}/{HERE}/"
    ),
    lambda d, p: _sh(f"rsync -a -e '{' '.join(p.ssh)}' {_ssh_host(p, '')}:{p.files}/{HERE}/ {d}/"),
    "rsync",
)
OVER_S3 = (CKPTSYNC, STORE, S5CMD, RCLONE, BOTO3, S3FS)
OVER_SFTP = (CKPTSYNC, STORE, SFTP, RSYNC)


def _rclone(place: Place) -> str:
    return f"S:{place.below(HERE).removeprefix('s3://')}"


def _sh(line: str) -> list[str]:
    return ["sh", "-c", line]


def _ssh_host(place: Place, path: str = "/") -> str:
    """``-F config user@host:/directory`` for sftp.

    Without the path ``user@host``, for rsync, which is given the configuration by -e.
    """
    host = place.url.removeprefix("sftp://").partition("/")[0].rpartition(":")[0]
    return f"{' '.join(place.ssh[1:])} {host}:{place.files}" if path else host
