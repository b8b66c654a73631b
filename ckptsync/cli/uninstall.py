"""``ckptsync uninstall``: remove what ckptsync has written on this machine outside its package.

A package manager removes the program only.  What stays behind are systemd units, the hook's line,
caches, and, for whom they are needless too, configurations and spools.  The command lists them, and
removes what can be made again; with ``--purge`` also what cannot.  It never changes a store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptsync.catalogue.cached import cache_path
from ckptsync.cli import hook, output, service
from ckptsync.cli.arguments import add_dry_run
from ckptsync.config.loading import load
from ckptsync.config.output_dirs import output_directories
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.spool.pins import list_pins
from ckptsync.walk import SPOOL

DETAILS = (
    "Removes systemd units that `ckptsync service install` wrote and that are disabled, the hook's"
    " line of the Python that runs this command, and caches. It never changes a store, and stops no"
    " service. Run it as each user who has used ckptsync, and as root for system services."
)


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A file or directory that ckptsync wrote.

    ``needs_purge``: it cannot be made again, so only ``--purge`` removes it.  ``kept``: why it is
    not removed in any case; empty if nothing prevents that.
    """

    path: Path
    needs_purge: bool = False
    kept: str = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    command.add_argument(
        "--purge",
        action="store_true",
        help="also remove configurations, and the spools (_ckptsync) of the output directories that"
        " they name, unless a save in them may not be stored yet",
    )
    add_dry_run(command, "removed")


def run(args: argparse.Namespace) -> int:
    """Remove what is left behind, and print what was removed and what stays; return 0.

    Without ``--purge``, files that cannot be made again stay; files that are `kept` always stay.
    A dry run only prints.  Raises ConfigError if a file cannot be removed, or, unless it is a dry
    run, while a service is enabled.
    """
    enabled = service.list_enabled()
    if enabled and not args.dry_run:
        commands = " && ".join(enabled)
        raise ConfigError(
            "a service is enabled, and may be running", hint=f"{commands}, then again"
        )
    removed, kept_lines = [], []
    for item in _list_left_behind():
        if item.kept:
            kept_lines.append(f"{item.path}: {item.kept}")
        elif item.needs_purge and not args.purge:
            kept_lines.append(f"{item.path}: --purge removes it")
        else:
            removed.append(item.path)
    for path in () if args.dry_run else removed:
        _remove(path)
    notes = [] if removed or kept_lines else ["nothing is left behind by this user"]
    notes += [f"{command} comes first" for command in enabled]
    notes.append("no store was changed")
    output.print_removal(args, removed, kept_lines, notes, [_remove_program()])
    return 0


def _list_left_behind() -> Iterator[LeftBehind]:
    """Yield what this user's ckptsync has written, the files that need no purge first.  Lazy.

    A spool comes after its configuration.  Raises ConfigError if a unit may not be read.
    """
    for path in service.list_written_units():
        yield LeftBehind(path)
    line = Path(sysconfig.get_path("purelib")) / hook.NAME
    if os.path.lexists(line):
        yield LeftBehind(line)
    with contextlib.suppress(RuntimeError):  # a user without a home has no cache
        cache = cache_path("").parent
        if cache.name == "ckptsync" and cache.is_dir():  # CACHE_DIRECTORY may be anybody's
            yield LeftBehind(cache)
    for path in service.list_configurations():
        spools, why = _find_spools(path) if path.suffix == ".yaml" else ([], "")
        yield LeftBehind(path, needs_purge=True, kept=why)
        yield from spools


def _find_spools(configuration: Path) -> tuple[list[LeftBehind], str]:
    """Return the spools of a configuration's output directories, and why it must stay, or "".

    It must if it cannot be read, or if a spool stays: one that cannot be read, or has a pin that is
    not marked as stored.
    """
    try:
        config = load(configuration)
        runs = config.worker.runs if "worker" in config.roles else ()
        directories = [Path(run.path) for run in output_directories(runs, config.store.url).runs]
    except CkptsyncError as e:
        return [], f"its output directories are not known: {e}"
    spools = []
    for directory in directories:
        spool = directory / SPOOL
        try:
            count = sum(not pin.stored for pin in list_pins(directory))
        except CkptsyncError as e:
            spools.append(LeftBehind(spool, needs_purge=True, kept=f"cannot be read: {e}"))
            continue
        drain = shlex.join(["ckptsync", "drain", str(directory), "-c", str(configuration)])
        why = f"{count} saves in it may not be stored yet: {drain}" if count else ""
        if spool.is_dir():
            spools.append(LeftBehind(spool, needs_purge=True, kept=why))
    is_needed = any(spool.kept for spool in spools)
    return spools, "a spool that stays needs it" if is_needed else ""


def _remove(path: Path) -> None:
    """Remove a file, a directory with all in it, or a unit with its empty directory.

    Raises ConfigError if it cannot be removed.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            return
        path.unlink(missing_ok=True)
        if path.parent.name.endswith(".service.d"):
            with contextlib.suppress(OSError):  # it has files of the operator
                path.parent.rmdir()
    except OSError as e:
        hint = "run this as the owner of that file"
        raise ConfigError(f"{path}: cannot be removed: {e.strerror}", hint=hint) from e


def _remove_program() -> str:
    """Return the command that removes the program: rm of the zipapp, uv, pipx, or pip."""
    environment = Path(sys.prefix)
    if zipfile.is_zipfile(sys.argv[0]):
        return shlex.join(["rm", str(Path(sys.argv[0]).absolute())])
    if (environment / "uv-receipt.toml").exists():
        return "uv tool uninstall ckptsync"
    if (environment / "pipx_metadata.json").exists():
        return "pipx uninstall ckptsync"
    return shlex.join([sys.executable, "-m", "pip", "uninstall", "ckptsync"])
