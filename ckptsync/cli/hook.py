"""``ckptsync hook install`` and ``hook remove``: one line beside a Python's packages, so that ``CKPTSYNC_AUTOLOAD=1`` gives each of its trainers the hook.

Python reads every ``.pth`` file beside its packages when it starts, and so does each process that torchrun or Ray starts.  The line does nothing
without the variable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ckptsync.cli import output
from ckptsync.cli.arguments import add_command
from ckptsync.errors import CkptsyncError, ConfigError, StoreError

NAME = "ckptsync-autoload.pth"
_PATIENCE = 60.0  # seconds for a Python to start
_PROBE = """
import json, sys, sysconfig
has_loaded, why = "ckptsync.hooks.autoload" in sys.modules, ""
try:
    import ckptsync.hooks.autoload
except Exception as e:
    why = f"{type(e).__name__}: {e}"
print(json.dumps([sysconfig.get_path("purelib"), has_loaded, why]))
"""


DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the actions and their argument."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = add_command(
        actions,
        "install",
        "add a line to a Python's packages, so that CKPTSYNC_AUTOLOAD=1 gives each Hugging Face Trainer the hook",
        "Without the variable the line does nothing.  `ckptsync help hook` says what the hook does.",
    )
    remove = add_command(actions, "remove", "remove that line", "Do this before you uninstall ckptsync from that Python.")
    for name, action in (("install", install), ("remove", remove)):
        action.set_defaults(action=name)
        action.add_argument("--python", metavar="PYTHON", help="the Python that trains (default: the one that runs this command)")


class _Answer(NamedTuple):
    """Where a Python's packages lie, whether it had loaded the hook's module when it began, and why it cannot, if it cannot."""

    folder: Path
    has_loaded: bool
    why: str


def run(args: argparse.Namespace) -> int:
    """Install or remove the line of one Python, and say what was done.  Raises ConfigError where that Python cannot be run, or may not be changed."""
    python = _python(args.python)
    state, path = (_install if args.action == "install" else _remove)(python)
    if args.json:
        output.print_json({"python": python, "path": str(path), "state": state})
        return 0
    print(output.clean(f"{path}: {state}"))
    if args.action == "install":
        print(
            output.clean(
                f"CKPTSYNC_AUTOLOAD=1 now gives each Hugging Face Trainer of {python} the hook; without it nothing changes"
            )
        )
    return 0


def _install(python: str) -> tuple[str, Path]:
    folder, _, why = _asked(python)
    if why:
        raise ConfigError(f"{python}: has no ckptsync: {why}", hint=f"{python} -m pip install ckptsync")
    path, line = folder / NAME, resources.files("ckptsync").joinpath("hooks/autoload.pth").read_bytes()
    before = path.read_bytes() if path.is_file() else None
    if before != line:
        _write(path, line)
    if not _asked(python, CKPTSYNC_AUTOLOAD="1").has_loaded:
        raise CkptsyncError(
            f"{path}: is there, but {python} does not read it", hint="is it started with -S, or without its site packages?"
        )
    return "unchanged" if before == line else "installed" if before is None else "replaced", path


def _remove(python: str) -> tuple[str, Path]:
    path = _asked(python).folder / NAME
    try:
        path.unlink()
    except FileNotFoundError:
        return "not there", path
    except OSError as e:
        raise _refusal(path, e) from e
    return "removed", path


def _write(path: Path, line: bytes) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(line)
        new.chmod(0o644)
        new.replace(path)
    except OSError as e:
        new.unlink(missing_ok=True)
        raise _refusal(path, e) from e


def _refusal(path: Path, error: OSError) -> CkptsyncError:
    if isinstance(error, PermissionError) or not path.parent.is_dir():
        hint = "run this as the owner of that directory, or name the Python of an environment of your own with --python"
        return ConfigError(f"{path.parent}: cannot be written: {error.strerror}", hint=hint)
    return StoreError(f"{path}: {error.strerror}", hint="look at that disk or path, then try again")


def _python(wanted: str | None) -> str:
    """The path of the Python that is to have the line, with its links, which name an environment."""
    found = shutil.which(wanted) if wanted else sys.executable
    if not found:
        raise ConfigError(f"{wanted}: no such program", hint="give the path of the Python that trains: /opt/train/bin/python")
    return os.path.abspath(found)  # noqa: PTH100 - links stay


def _asked(python: str, **variables: str) -> _Answer:
    """Run `_PROBE` in that Python, with these variables.  Raises ConfigError where that fails."""
    environment = {key: value for key, value in os.environ.items() if key != "CKPTSYNC_AUTOLOAD"} | variables
    try:
        done = subprocess.run(  # noqa: S603 - the operator names it
            [python, "-"], input=_PROBE, cwd="/", env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        folder, has_loaded, why = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"{python}: does not answer within {_PATIENCE:.0f} s") from e
    except OSError as e:
        raise ConfigError(f"{python}: cannot be run: {e.strerror}") from e
    except ValueError as e:
        said = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{python}: not a Python that answers: {said or f'exit code {done.returncode}'}") from e
    return _Answer(Path(folder), bool(has_loaded), str(why))
