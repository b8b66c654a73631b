"""The Python that trains, asked by its own means: it may have none of our libraries, and we none of its."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsync.doctor import probe
from ckptsync.errors import ConfigError

_PATIENCE = 120.0  # seconds: a driver that wakes its GPUs takes some


def candidates(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The environment's that is active; else the first in PATH, and our own."""
    active = [Path(environment[name], "bin", "python") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environment.get(name)]
    if found := next((str(path) for path in active if path.exists()), None):
        return (found,)
    first = shutil.which("python3", path=environment.get("PATH"))
    return tuple(dict.fromkeys(python for python in (first, sys.executable) if python))


def ask_one(pythons: Sequence[str], **wanted: Any) -> dict[str, Any]:
    """The first of them that has torch, or else the first; raises ConfigError where it cannot be asked."""
    told = ask(pythons[0], **wanted)
    if told["versions"].get("torch") or len(pythons) == 1:
        return told
    others = (ask(python, **wanted) for python in pythons[1:])
    return next((other for other in others if other["versions"].get("torch")), told)


def ask(python: str, **wanted: Any) -> dict[str, Any]:
    """What `probe.gather` says in that interpreter; raises ConfigError where it cannot be run, or says nothing that can be read."""
    command = [python, os.fspath(probe.__file__), json.dumps(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)  # noqa: S603 - the operator names it
        told = json.loads((done.stdout.splitlines() or [""])[-1])  # what an environment's own start-up prints stands before it
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            f"{python}: cannot tell of itself (exit code {e.returncode}): {last}",
            hint="--python names the Python that trains, 3.8 or newer",
        ) from e
    except (OSError, subprocess.TimeoutExpired, ValueError) as e:
        late = f"no answer within {_PATIENCE:g} s" if isinstance(e, subprocess.TimeoutExpired) else str(e)
        reason = e.strerror if isinstance(e, OSError) else late
        raise ConfigError(
            f"{python}: cannot tell of itself: {reason}", hint="--python names the Python that trains, 3.8 or newer"
        ) from e
    return dict(told)
