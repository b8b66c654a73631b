"""``ckptsync service uninstall``: remove the units that ``service install`` wrote, and nothing else.  It stops nothing: the commands that do are printed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptsync.cli import output, service, units
from ckptsync.errors import ConfigError, StoreError


@dataclass(frozen=True, slots=True)
class Found:
    """``folder`` of systemd's, and the ``unit`` in it that is to go; ``files`` of ours, ``kept`` with the reason; ``enabled``: links that still start it."""

    folder: Path
    unit: str
    files: tuple[Path, ...]
    kept: tuple[str, ...]
    enabled: tuple[Path, ...]


def run(args: argparse.Namespace) -> int:
    """Look, remove unless it is a dry run, and say so.  Raises ConfigError while the service is enabled: only its unit knows how to undo that."""
    found = _users(args) if args.user else _systems(args)
    disable = f"systemctl {'--user ' if args.user else ''}disable --now {found.unit}"
    if found.enabled and not args.dry_run:
        raise ConfigError(f"{found.enabled[0]}: the service is enabled, and may be running", hint=f"{disable}, then try again")
    for path in () if args.dry_run else found.files:
        _remove(path)
    _say(args, found, disable)
    return 0


def _systems(args: argparse.Namespace) -> Found:
    user = args.train or os.environ.get("SUDO_USER", "")
    if not (user or args.head):
        raise ConfigError("whose worker is not known", hint="--as USER, --head for the head, --user for a service of your own")
    if args.train and args.head:
        raise ConfigError("--as: a machine has one head", hint="leave it out, or leave out --head")
    unit = "ckptsync-head" if args.head else f"ckptsync-worker@{user}"
    own = service.SYSTEM / ("ckptsync-head.service" if args.head else "ckptsync-worker@.service")
    others = [] if args.head else _others(service.SYSTEM, unit)
    found = _found(service.SYSTEM, unit, [service.SYSTEM / f"{unit}.service.d" / "10-ckptsync.conf", *([] if others else [own])])
    shared = f"{own}: {others[0]} is made from it, too" if others else ""
    return Found(found.folder, unit, found.files, (*found.kept, *([shared] if shared else [])), found.enabled)


def _users(args: argparse.Namespace) -> Found:
    if args.train:
        raise ConfigError("--as: a user's own systemd runs what is that user's", hint="leave it out, or leave out --user")
    folder = service.own_folder() / "systemd/user"
    unit = "ckptsync-head" if args.head else "ckptsync-worker"
    return _found(folder, unit, [folder / f"{unit}.service"])


def _found(folder: Path, unit: str, wanted: list[Path]) -> Found:
    there = [path for path in wanted if path.is_file()]
    ours = tuple(path for path in there if _is_ours(path))
    kept = [f"{path}: was not written by this command" for path in there if path not in ours]
    kept += [f"{path}: your own" for path in sorted((folder / f"{unit}.service.d").glob("*")) if path not in wanted]
    return Found(
        folder,
        unit,
        ours,
        tuple(kept),
        tuple(sorted(link for wants in folder.glob("*.wants") if (link := wants / f"{unit}.service").is_symlink())),
    )


def _others(folder: Path, unit: str) -> list[str]:
    """Other users' workers, which the same template makes."""
    names = {p.name.removesuffix(".d") for p in folder.glob("ckptsync-worker@?*.service.d") if (p / "10-ckptsync.conf").is_file()}
    names |= {p.name for p in folder.glob("*.wants/ckptsync-worker@?*.service")}
    return sorted(names - {f"{unit}.service"})


def _is_ours(path: Path) -> bool:
    try:
        return units.MARK in path.read_text("utf-8")
    except UnicodeDecodeError:
        return False
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}", hint="as root, or with --user for a service of your own") from e


def _remove(path: Path) -> None:
    try:
        path.unlink()
        if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
            path.parent.rmdir()
    except PermissionError as e:
        raise ConfigError(f"{path}: {e.strerror}", hint="as root, or with --user for a service of your own") from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}", hint="look at that disk or path, then try again") from e


def _notes(args: argparse.Namespace, found: Found, disable: str) -> Iterator[str]:
    if found.enabled:  # only in a dry run
        yield f"{found.unit} is enabled: {disable} comes first"
    if not found.files:
        yield f"{found.folder}: holds nothing of {found.unit} that this command wrote"
    elif not found.enabled and not args.dry_run:
        yield f"if {found.unit} still runs it goes on: {disable.replace('disable --now', 'stop')}"
    yield "configurations, spools (_ckptsync) and the store are as they were"


def _say(args: argparse.Namespace, found: Found, disable: str) -> None:
    notes, following = list(_notes(args, found, disable)), [f"systemctl {'--user ' if args.user else ''}daemon-reload"]
    if args.json:
        told = {key: value for key, value in asdict(found).items() if key in ("unit", "kept")}
        output.print_json(
            {"dry_run": args.dry_run, "removed": list(map(str, found.files)), **told, "notes": notes, "next": following}
        )
        return
    for path in found.files:
        print(f"{path}: {'would be ' if args.dry_run else ''}removed")
    for line in found.kept:
        print(output.clean(f"kept {line}"))
    for note in notes:
        print(output.clean(f"note: {note}"))
    print("then:", *following, sep="\n    ")
