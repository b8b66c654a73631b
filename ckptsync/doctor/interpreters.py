"""The Python that trains, asked by its own means: it may have none of our libraries, and we none of its."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsync.doctor import probe
from ckptsync.errors import ConfigError

_PATIENCE = 120.0  # seconds: a driver that wakes its GPUs takes some


def training_python(given: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """The one that is given; else of the environment that is active, else the first in PATH, else our own."""
    if given:
        return given
    active = [Path(environment[name], "bin", "python") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environment.get(name)]
    found = next((str(path) for path in active if path.exists()), None)
    return found or shutil.which("python3", path=environment.get("PATH")) or sys.executable


def ask(python: str, **wanted: Any) -> dict[str, Any]:
    """What `probe.gather` says in that interpreter; raises ConfigError where it cannot be run, or says nothing that can be read."""
    command = [python, os.fspath(probe.__file__), json.dumps(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)  # noqa: S603 - the operator names it
        told = json.loads(done.stdout)
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            f"{python}: cannot tell of itself (exit code {e.returncode}): {last}",
            hint="--python names the Python that trains, 3.8 or newer",
        ) from e
    except (OSError, subprocess.TimeoutExpired, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise ConfigError(
            f"{python}: cannot tell of itself: {reason}", hint="--python names the Python that trains, 3.8 or newer"
        ) from e
    return dict(told)
