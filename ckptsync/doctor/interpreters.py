"""The Python that trains, asked by its own means: it may have none of our libraries, and we none of its."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsync.doctor import probe
from ckptsync.doctor.asking import user
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.parsing import parse
from ckptsync.walk import is_kept

_PATIENCE = 120.0  # seconds: a driver that wakes its GPUs takes some
_AS_TRAINER = "ask as the user who trains: sudo -u USER ckptsync doctor …"
_MOST_LINKS = 40
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "LC_ALL")


def candidates(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The environment's that is active; else the first in PATH, and our own."""
    active = [Path(environment[name], "bin", "python") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environment.get(name)]
    if found := next((str(path) for path in active if path.exists()), None):
        return (found,)
    first = shutil.which("python3", path=environment.get("PATH"))
    return tuple(dict.fromkeys(python for python in (first, sys.executable) if python))


def ask_one(pythons: Sequence[str], environment: Mapping[str, str] = os.environ, **wanted: Any) -> dict[str, Any]:
    """The first of them that has torch, or else the first; raises ConfigError where it cannot be asked."""
    told = ask(pythons[0], environment, **wanted)
    if told["versions"].get("torch") or len(pythons) == 1:
        return told
    others = (ask(python, environment, **wanted) for python in pythons[1:])
    return next((other for other in others if other["versions"].get("torch")), told)


def ask(python: str, environment: Mapping[str, str] = os.environ, **wanted: Any) -> dict[str, Any]:
    """What `probe.gather` says in that interpreter, which gets this ``environment``; raises ConfigError where it cannot be run, or says nothing that can be read.

    Root lets another user's Python be asked by that user, who gets nothing of the environment that could be a secret.
    """
    found = shutil.which(python, path=environment.get("PATH")) or python
    named = os.path.abspath(found)  # noqa: PTH100 - links stay: they name an environment
    command = [named, "-", json.dumps(wanted)]  # by its input: that user may not be able to read what is ours
    owner = _owner(Path(named)) if os.geteuid() == 0 else 0
    try:
        done = subprocess.run(  # noqa: S603 - the operator names it
            command,
            input=Path(probe.__file__).read_text("utf-8"),
            cwd="/",  # where no module of anybody's lies
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
            **(_becoming(owner, environment) if owner else {"env": environment}),
        )
        told = parse((done.stdout.splitlines() or [""])[-1], python)  # what an environment's own start-up prints stands before it
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            f"{python}: cannot tell of itself (exit code {e.returncode}): {last}",
            hint="--python names the Python that trains, 3.8 or newer",
        ) from e
    except (OSError, subprocess.SubprocessError, ValueError, Corrupt) as e:
        late = f"no answer within {_PATIENCE:g} s" if isinstance(e, subprocess.TimeoutExpired) else str(e)
        reason = e.strerror if isinstance(e, OSError) else late
        raise ConfigError(
            f"{python}: cannot tell of itself: {reason}", hint="--python names the Python that trains, 3.8 or newer"
        ) from e
    if not isinstance(told, dict) or not all(isinstance(told.get(key), dict) for key in ("versions", "places")):
        raise ConfigError(f"{python}: cannot tell of itself: its answer is none", hint="what does it print when it starts?")
    return told


def _owner(python: Path) -> int:
    """Who decides what a Python does, root or one other user: of the program, of the links and directories that lead to it, and of where it imports from.

    Raises ConfigError where that is several, or anybody.
    """
    ways = [python]
    while ways[-1].is_symlink() and len(ways) < _MOST_LINKS:
        ways.append(ways[-1].parent / ways[-1].readlink())
    ways.append(Path(os.path.realpath(python)))
    homes = {way.parent.parent for way in ways}
    inside = {
        found
        for home in homes
        for pattern in ("pyvenv.cfg", "lib*", "lib*/python3*", "lib*/python3*/site-packages")
        for found in home.glob(pattern)
    }
    owners: dict[int, Path] = {}
    for path in sorted({*ways, *inside, *(above for way in ways for above in way.parents)}):
        with contextlib.suppress(OSError):  # not there: it is told when it is run
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == 0 and not is_kept(info):
                raise ConfigError(
                    f"{python}: asked by root, and others may write to {path}", hint=f"chmod o-w {path}, or {_AS_TRAINER}"
                )
            owners.setdefault(info.st_uid, path)
    others = sorted(owners.keys() - {0})
    if len(others) > 1:
        whose = ", ".join(f"{owners[uid]} is {user(uid)}'s" for uid in others)
        raise ConfigError(f"{python}: asked by root, and {whose}", hint=_AS_TRAINER)
    return others[0] if others else 0


def _becoming(owner: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """How a process begins as another user: with that user's groups and home, and without this command's terminal."""
    group, groups = probe.groups_of(owner)
    kept = {name: value for name, value in environment.items() if name in _KEPT or name in probe.variables(environment)}
    with contextlib.suppress(KeyError):  # a user of a container
        known = pwd.getpwuid(owner)
        kept |= {"HOME": known.pw_dir, "LOGNAME": known.pw_name}
    return {"env": kept, "user": owner, "group": group, "extra_groups": groups, "start_new_session": True}
