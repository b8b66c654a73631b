"""``ckptsync hook install`` and ``hook uninstall``: give each trainer of a Python the hook.

A user should not have to change a training script.  Every Python process reads the ``.pth`` files
beside its packages when it starts, also under torchrun or Ray.  The command writes such a file with
one line; it installs the hook if ``CKPTSYNC_AUTOLOAD=1`` is set, and does nothing without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

from ckptsync import safe_open
from ckptsync.cli import output
from ckptsync.cli.arguments import add_command, add_dry_run
from ckptsync.doctor.training_facts import check_is_ours
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.install_commands import install_self

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


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = add_command(
        actions,
        "install",
        "add a line to a Python's packages, so that CKPTSYNC_AUTOLOAD=1 gives each Hugging Face"
        " Trainer the hook",
        "Without the variable the line does nothing. `ckptsync help hook` says what the hook does.",
    )
    uninstall = add_command(
        actions,
        "uninstall",
        "remove that line",
        "Do this before you uninstall ckptsync from that Python.",
    )
    for name, action, does in (
        ("install", install, "written"),
        ("uninstall", uninstall, "removed"),
    ):
        action.set_defaults(action=name)
        action.add_argument(
            "--python",
            metavar="PYTHON",
            help="the Python that trains (default: the one that runs this command)",
        )
        add_dry_run(action, does)
    old = actions.add_parser("remove")  # the old name of uninstall, which `run` refuses
    old.set_defaults(action="remove")
    old.add_argument("--python")
    old.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Install or remove the line of one Python, print what was done, and return 0.

    Raises ConfigError if that Python cannot be run or its packages cannot be changed, CkptsyncError
    if it does not load the line.
    """
    if args.action == "remove":
        raise ConfigError("hook remove: no such action", hint="ckptsync hook uninstall")
    program = shutil.which(args.python) if args.python else sys.executable
    if not program:
        hint = "give the path of the Python that trains: /opt/train/bin/python"
        raise ConfigError(f"{args.python}: no such program", hint=hint)
    python = os.path.abspath(program)  # noqa: PTH100 - its links stay: they name an environment
    if args.python:  # the Python that runs this command is trusted
        check_is_ours(Path(python))
    folder, _, why = _probe(python)
    path = Path(folder) / NAME
    if args.action == "uninstall":
        return _uninstall(args, python, path)
    state = _install(python, path, why, is_dry=args.dry_run)
    if args.json:
        result = {"python": python, "path": str(path), "state": state}
        output.print_json({"dry_run": args.dry_run, **result})
        return 0
    would = "would be " if args.dry_run and state != "unchanged" else ""
    output.say(f"{path}: {would}{state}")
    now = "would give" if args.dry_run else "now gives"
    effect = f"CKPTSYNC_AUTOLOAD=1 {now} each Hugging Face Trainer of {python} the hook"
    output.say(f"{effect}; without it nothing changes")
    return 0


def _install(python: str, path: Path, why: str, *, is_dry: bool) -> str:
    """Write the line unless it is a dry run; return "installed", "replaced" or "unchanged".

    A link there is replaced by a file.  ``why``: why that Python cannot import the hook; raises
    ConfigError if it is not "".  Starts that Python; raises CkptsyncError if it does not load the
    line then, and the errors of `_refusal`.
    """
    if why:
        raise ConfigError(f"{python}: has no ckptsync: {why}", hint=install_self(python))
    line = resources.files("ckptsync").joinpath("hooks/autoload.pth").read_bytes()
    old_line = None
    with contextlib.suppress(OSError):  # absent, or no file
        old_line = safe_open.read_named(path, len(line))
    has_file = os.path.lexists(path)
    state = "unchanged" if old_line == line else "replaced" if has_file else "installed"
    if is_dry:
        return state
    if old_line != line or path.is_symlink():
        try:
            safe_open.replace_named(path, line)
        except OSError as e:
            raise _refusal(path, e) from e
    if not _probe(python, CKPTSYNC_AUTOLOAD="1")[1]:
        hint = "check that it is not started with -S or without its site packages"
        raise CkptsyncError(f"{path}: exists, but {python} does not load it", hint=hint)
    return state


def _uninstall(args: argparse.Namespace, python: str, path: Path) -> int:
    """Remove the line unless it is a dry run, and print that; return 0.

    Raises the errors of `_refusal`.
    """
    removed = [path] if os.path.lexists(path) else []
    try:
        for line in () if args.dry_run else removed:
            line.unlink(missing_ok=True)
    except OSError as e:
        raise _refusal(path, e) from e
    notes = [] if removed else [f"{path.parent}: holds no {NAME}"]
    output.print_removal(args, removed, (), notes, python=python)
    return 0


def _refusal(path: Path, error: OSError) -> CkptsyncError:
    """Return a failed change of a Python's packages as an error with a hint.

    ConfigError without the right to write, or if the directory is absent; else StoreError.
    """
    if isinstance(error, PermissionError) or not path.parent.is_dir():
        alternative = "or name the Python of an environment of your own with --python"
        hint = f"run this as the owner of that directory, {alternative}"
        return ConfigError(f"{path.parent}: cannot be written: {error.strerror}", hint=hint)
    return StoreError(f"{path}: {error.strerror}", hint="check that disk or path, then try again")


def _probe(python: str, **variables: str) -> tuple[str, bool, str]:
    """Run a Python; return where its packages lie, whether it loaded the hook, and why it cannot.

    ``variables`` are set in its environment, without CKPTSYNC_AUTOLOAD otherwise.  Raises
    ConfigError if it cannot be run, or does not answer within `_PATIENCE` seconds.
    """
    environment = {k: v for k, v in os.environ.items() if k != "CKPTSYNC_AUTOLOAD"} | variables
    try:
        done = subprocess.run(  # noqa: S603 - the operator names it
            [python, "-"],
            input=_PROBE,
            cwd="/",
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        folder, has_loaded, why = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired as e:
        raise ConfigError(f"{python}: does not answer within {_PATIENCE:.0f} s") from e
    except OSError as e:
        raise ConfigError(f"{python}: cannot be run: {e.strerror}") from e
    except ValueError as e:
        last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ConfigError(f"{python}: not a Python: {last}") from e
    return str(folder), bool(has_loaded), str(why)
