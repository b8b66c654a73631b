"""The public command where it has to say no: what it must look like, whoever refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.campaigns.campaign import CLEAN

ROOTS_RIGHTS = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: capabilities(7)
_DROP = 24  # PR_CAPBSET_DROP: prctl(2)


def refused(
    *arguments: str | Path,
    code: int,
    names: Iterable[str | Path],
    secrets: Iterable[str] = (),
    within: float = 110.0,
    env: Mapping[str, str] | None = None,
) -> str:
    """What ``ckptsync`` said: one line that names all of ``names``, and at most a hint, after
    others that it is trying again; its exit code is ``code``.

    No secret is in it, nor a traceback, and it ends ``within`` seconds.
    """
    begun = time.monotonic()
    done = run(arguments, env or {})
    said = (
        f"{done.args} after {time.monotonic() - begun:.1f} s: {done.returncode}\n"
        f"{done.stdout}\n"
        f"{done.stderr}"
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ckptsync: error: ")]
    hints = [line for line in done.stderr.splitlines() if line.startswith("ckptsync: hint: ")]
    others = [line for line in done.stderr.splitlines() if line not in errors + hints]
    assert done.returncode == code, said
    assert len(errors) == 1, said
    assert len(hints) <= 1, said
    assert all(
        "trying again for up to" in line or line.endswith(": created a new store")
        for line in others
    ), said
    assert all(str(name) in errors[0] for name in names), said
    assert not any(secret in done.stdout + done.stderr for secret in secrets), said
    assert time.monotonic() - begun < within, said
    return "\n".join([*errors, *hints])


def run(
    arguments: Iterable[str | Path], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """The public command as a user has it whom permissions bind, root or not."""
    return subprocess.run(
        [sys.executable, "-m", "ckptsync", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**CLEAN, **env},
        preexec_fn=_as_anybody if os.getuid() == 0 else None,
    )


def _as_anybody() -> None:
    libc = ctypes.CDLL(None)
    for right in ROOTS_RIGHTS:
        libc.prctl(_DROP, right, 0, 0, 0)
