"""``ckptsync demo``: the whole story on this machine, in a minute."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ckptsync.cli.demo_processes import running
from ckptsync.cli.demo_story import RUNS, Story, configurations, ending
from ckptsync.cli.demo_view import view
from ckptsync.cli.output import print_json
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.stores.opening import create_store

DETAILS = "It works in a temporary directory and takes about a minute."


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument("--dir", metavar="DIR", help="where to work: an empty or absent directory (default: a new temporary one)")


def run(args: argparse.Namespace) -> int:
    """Exit 0 only if everything was really observed in the store; what is not as it should be is exit 1, whatever its kind."""
    directory = stage(args.dir)
    store = create_store(str(directory / "store"))
    try:
        with view(as_json=args.json) as shown, running(directory / "etc", configurations(directory)) as children:
            story = Story(directory, store, children, shown)
            story.tell()
    except CkptsyncError as e:
        raise CkptsyncError(f"demo: {e}", hint=e.hint or f"read the logs in {directory / 'etc'}") from e
    if args.json:
        print_json({"ok": True, "directory": str(directory), "models": {run: str(story.model(run)) for run in RUNS}})
    else:
        print("\n".join(ending(story)))
    return 0


def stage(wanted: str | None) -> Path:
    """An empty directory to work in; raises ConfigError."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="ckptsync-demo-")).resolve()
    directory = Path(wanted).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: not an empty directory", hint="name one that is empty or absent")
    directory.mkdir(parents=True, exist_ok=True)
    return directory
