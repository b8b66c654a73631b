"""The public command where it has to say no: what it must look like, whoever refuses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from unittest import mock

from ckptsync.cli.main import main
from tests.campaigns.campaign import CLEAN

_RIGHTS_OF_ROOT = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: capabilities(7)
_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3: capget(2)


def refused(
    *arguments: str | Path,
    code: int,
    names: Iterable[str | Path],
    secrets: Iterable[str] = (),
    within: float = 110.0,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run ``ckptsync``; assert that it refuses as it must, and return its error and its hint.

    That is the exit code ``code``, one error that names all of ``names``, at most one hint, no
    secret, no traceback, and an end ``within`` seconds.
    """
    begun = time.monotonic()
    done = run(arguments, env or {})
    output = (
        f"{done.args} after {time.monotonic() - begun:.1f} s: {done.returncode}\n"
        f"{done.stdout}\n"
        f"{done.stderr}"
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ckptsync: error: ")]
    hints = [line for line in done.stderr.splitlines() if line.startswith("ckptsync: hint: ")]
    other_lines = [line for line in done.stderr.splitlines() if line not in errors + hints]
    assert done.returncode == code, output
    assert len(errors) == 1, output
    assert len(hints) <= 1, output
    assert all(
        "trying again for up to" in line or line.endswith(": created a new store")
        for line in other_lines
    ), output
    assert all(str(name) in errors[0] for name in names), output
    assert not any(secret in done.stdout + done.stderr for secret in secrets), output
    assert time.monotonic() - begun < within, output
    return "\n".join([*errors, *hints])


def run(
    arguments: Iterable[str | Path], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Return what the command line did in this process, as a user whom permissions bind."""
    words, out, err = [*map(str, arguments)], StringIO(), StringIO()
    with (
        mock.patch.dict(os.environ, {**CLEAN, **env}, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _bound_by_permissions(),
    ):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _bound_by_permissions() -> Iterator[None]:
    """Take root's rights over files from this thread, and from threads that it starts."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_VERSION, 0)
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~_RIGHTS_OF_ROOT  # of the effective ones: the permitted ones can be taken again
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
