"""Nodes, and Pythons that train, made on this machine: a virtual environment with a few names in
it, a namespace with disks of its own.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
# What a machine that runs these tests may lack itself: shell that sets it up in a namespace.
SOUND_MACHINE = """
mount -t tmpfs -o size=1g tmpfs /dev/shm
ulimit -n 2048
"""
_ISOLATED = ("unshare", "--map-root-user", "--mount", "--uts", "sh", "-e", "-c")


def environment(home: Path, versions: Mapping[str, str], cuda: str = "12.8") -> str:
    """The Python of a new virtual environment which has libraries of these versions, in name."""
    venv.create(home, symlinks=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    for name, version in versions.items():
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (packages / "torch").mkdir()
    (packages / "torch/version.py").write_text(
        "__version__ = 'x'\n"
        "debug = False\n"
        f"cuda: Optional[str] = {cuda!r}\n"
        "hip: Optional[str] = None\n"
    )
    return str(home / "bin/python")


def can_isolate() -> bool:
    """Whether namespaces with mounts of their own can be made here."""
    return bool(shutil.which("unshare")) and _allows_mounts()


@functools.cache
def _allows_mounts() -> bool:
    return (
        subprocess.run(
            [*_ISOLATED, "mount -t tmpfs tmpfs /mnt; hostname x"], capture_output=True, check=False
        ).returncode
        == 0
    )


needs_namespaces = pytest.mark.skipif(
    not can_isolate(), reason="mounting is not allowed here, not even in a namespace of its own"
)


def doctor(
    words: Sequence[object], setup: str = "", within: Sequence[str] = (), **variables: str
) -> dict[str, Any]:
    """What `ckptsync doctor --json` says in a process of its own.

    ``setup``: shell that prepares a namespace for it before, ``within``: a command that runs it.
    """
    command = [*within, sys.executable, "-m", "ckptsync", "doctor", "--json", *map(str, words)]
    if setup:
        command = [*_ISOLATED, f'{setup}\nexec "$@"', "sh", *command]
    plain = {
        name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
        env={**plain, **variables},
    )
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode
    return told


def kinds(told: Mapping[str, Any]) -> list[str]:
    return sorted({finding["kind"] for finding in told["findings"]})


def open_to_all(path: Path) -> None:
    """What pytest keeps for root."""
    for above in path.parents:
        if above.stat().st_uid == 0 and above.is_relative_to(tempfile.gettempdir()):
            above.chmod(above.stat().st_mode | 0o055)
