"""``ckptsync service install`` and ``service uninstall``: write or remove systemd units.  They start and stop nothing: they print the commands that do."""

from __future__ import annotations

import argparse
import getpass
import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from ckptsync.cli import output, units
from ckptsync.cli.arguments import add_command, add_dry_run
from ckptsync.cli.locations import read_configuration
from ckptsync.config.runs import existing_directories
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError, StoreError
from ckptsync.worker.node import node_id

SYSTEM = Path("/etc/systemd/system")
_HEADS_USER = "ckptsync"


DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the actions and their arguments."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = add_command(
        actions,
        "install",
        "write systemd units for a configuration",
        "It starts nothing; it prints the commands that do.\n"
        "A configuration with the role worker gets ckptsync-worker@USER, another one ckptsync-head.",
    )
    install.set_defaults(command=_install)
    install.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help="the service's configuration (default: /etc/ckptsync/USER.yaml; with --user, ~/.config/ckptsync/worker.yaml)",
    )
    install.add_argument(
        "--as",
        metavar="USER",
        dest="train",
        help="the user who trains (default: who called sudo), or who runs the head (default: ckptsync)",
    )
    install.add_argument("--user", action="store_true", help="for your own systemd (systemctl --user), without root")
    add_dry_run(install, "written")
    uninstall = add_command(
        actions,
        "uninstall",
        "remove the units that install wrote",
        "It stops nothing; it prints the commands that do.  Other files, configurations, spools and the store stay.",
    )
    uninstall.set_defaults(command=_uninstall)
    uninstall.add_argument("--as", metavar="USER", dest="train", help="whose worker (default: who called sudo)")
    uninstall.add_argument("--head", action="store_true", help="the head's units instead")
    uninstall.add_argument("--user", action="store_true", help="units of your own systemd (systemctl --user)")
    add_dry_run(uninstall, "removed")


def run(args: argparse.Namespace) -> int:
    """Run the action that was chosen."""
    return int(args.command(args))


@dataclass(frozen=True, slots=True)
class UnitFile:
    """``state``: what was, or would be, done: written, replaced, unchanged."""

    path: Path
    text: str
    state: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, what the operator should know, and what to run then."""

    files: tuple[UnitFile, ...]
    notes: tuple[str, ...]
    next: tuple[str, ...]


def _install(args: argparse.Namespace) -> int:
    """Write the units for a configuration, and print what was written."""
    plan = _users_plan(args) if args.user else _system_plan(args)
    states = [_state(file) for file in plan.files]
    if not args.dry_run:
        for file, state in zip(plan.files, states, strict=True):
            _write(file, state)
    files = [UnitFile(f.path, f.text, s) for f, s in zip(plan.files, states, strict=True)]
    _print_plan(args, Plan(tuple(files), plan.notes, plan.next))
    return 0


def _system_plan(args: argparse.Namespace) -> Plan:
    given = args.train or os.environ.get("SUDO_USER", "")
    source = Path(args.config or f"/etc/ckptsync/{given or 'train'}.yaml").absolute()
    config = read_configuration(source, variables(source))
    is_worker = "worker" in config.roles
    user = _known(given if is_worker else args.train or _HEADS_USER, is_worker=is_worker)
    found = units.paths(config, [entry.pw_dir for entry in pwd.getpwall()])
    gone = [path for path in found.needed if not Path(path).is_dir()]
    if gone and not args.dry_run:
        raise ConfigError(
            f"{gone[0]}: is not there, and a service cannot be given what is not",
            hint=f"mount it, or make it: install -d -o {user.pw_name} {gone[0]}",
        )
    unit, name = ("ckptsync-worker@.service", f"ckptsync-worker@{user.pw_name}") if is_worker else ("ckptsync-head.service",) * 2
    runner = "" if is_worker or user.pw_name == _HEADS_USER else user.pw_name
    files = (
        UnitFile(SYSTEM / unit, units.copied(_template(unit))),
        UnitFile(
            SYSTEM / f"{name.removesuffix('.service')}.service.d" / "10-ckptsync.conf",
            units.drop_in(config, _program(source), found, runner),
        ),
    )
    notes = (*found.notes, *(f"{path}: is not there yet" for path in gone), *_doubts(config, user, source))
    return Plan(files, notes, ("systemctl daemon-reload", f"systemctl enable --now {name.removesuffix('.service')}"))


def _users_plan(args: argparse.Namespace) -> Plan:
    home = own_folder()
    source = Path(args.config or home / "ckptsync/worker.yaml").absolute()
    if args.train:
        raise ConfigError("--as: a user's own systemd runs what is that user's", hint="leave it out, or leave out --user")
    is_worker = "worker" in read_configuration(source, variables(source)).roles
    template, name = ("ckptsync-worker@.service", "ckptsync-worker.service") if is_worker else ("ckptsync-head.service",) * 2
    text = units.for_user(_template(template), _program(source))
    linger = f"loginctl enable-linger {getpass.getuser()}"
    return Plan(
        (UnitFile(home / "systemd/user" / name, text),),
        ("a user's own systemd cannot shut the service in; without lingering it ends with the last session",),
        ("systemctl --user daemon-reload", f"systemctl --user enable --now {name.removesuffix('.service')}", linger),
    )


def own_folder() -> Path:
    """Where this user's own configuration is; raises ConfigError where that is another's, as under sudo: he decides what a path there means."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    owner = next(path for path in (home, *home.absolute().parents) if path.exists()).stat().st_uid
    if owner != os.geteuid() == 0:
        raise ConfigError(f"--user: {home} is {_name_of(owner)}'s, and this is root", hint=f"as {_name_of(owner)}, without sudo")
    return home


def variables(source: Path) -> Mapping[str, str]:
    """What the unit's EnvironmentFile says beside the configuration: the service does not see this shell's variables."""
    try:
        lines = Path(f"{str(source).removesuffix('.yaml')}.env").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # it may be absent, as the unit says, and if it cannot be read systemd says so
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith(("#", ";")))
    return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}


def _known(name: str, *, is_worker: bool) -> pwd.struct_passwd:
    if not name:
        raise ConfigError("the user who trains is not known: the worker runs as that user", hint="--as USER; --user for yourself")
    try:
        return pwd.getpwnam(name)
    except KeyError:
        hint = "--as names the user who trains" if is_worker else f"useradd --system --user-group {name}"
        raise ConfigError(f"{name}: there is no such user", hint=hint) from None


def _program(source: Path) -> units.Program:
    """The program that runs now, as it was called."""
    own = Path(sys.argv[0])
    found = own if own.is_absolute() else Path(shutil.which(sys.argv[0]) or own)
    is_script = found.name == "ckptsync" and os.access(found, os.X_OK)
    command = (str(found.absolute()),) if is_script else (sys.executable, "-m", "ckptsync")
    seen = (*(str(Path(p).resolve()) for p in (command[0], sys.executable)), sys.prefix, sys.base_prefix)
    return units.Program((*command, "run", "-c", str(source)), str(source), seen)


def _template(unit: str) -> str:
    return resources.files("ckptsync").joinpath("systemd").joinpath(unit).read_text("utf-8")


def _doubts(config: Config, user: pwd.struct_passwd, source: Path) -> Iterator[str]:
    """What would keep the service from its work, as far as can be seen from here."""
    if not _may(user, 4, source):
        yield f"{source}: {user.pw_name} cannot read it: chown or chgrp it"
    if not _may(user, 4, Path(sys.executable).resolve()):
        yield f"{Path(sys.executable).resolve()}: {user.pw_name} cannot reach this Python: make the environment with one below /usr or /opt"
    store = Path(units.local(config.store.url))
    if units.local(config.store.url) and store.is_dir() and not _may(user, 2, store):
        yield f"{store}: {user.pw_name} cannot write to it, unless a drop-in gives the service a group (`ckptsync help service`)"
    if "worker" not in config.roles:
        return
    for one in existing_directories(config.worker.runs, config.store.url).runs:
        owner = Path(one.path).stat().st_uid
        if owner != user.pw_uid:
            who = _name_of(owner)
            yield f"{one.path}: is of {who}, whose checkpoints {user.pw_name} can neither link nor read: a worker of {who}'s is wanted"
    others = {path.name for path in SYSTEM.glob("ckptsync-worker@*.service.d")} - {f"ckptsync-worker@{user.pw_name}.service.d"}
    if others and not config.node:
        yield f"{source}: several workers on one machine need a node's name each: node: {node_id()}-{user.pw_name}"


def _may(user: pwd.struct_passwd, bit: int, path: Path) -> bool:
    """Whether a user gets there, and may read (4) or write (2), by owner, groups and mode."""
    groups = {user.pw_gid, *os.getgrouplist(user.pw_name, user.pw_gid)}
    steps = [(parent, 1) for parent in path.resolve().parents]
    return user.pw_uid == 0 or all(_allows(at, user.pw_uid, groups, wanted) for at, wanted in [*steps, (path, bit)])


def _allows(path: Path, uid: int, groups: set[int], bit: int) -> bool:
    found = path.stat()
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
    return bool(found.st_mode >> shift & bit)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _state(file: UnitFile) -> str:
    """Raises ConfigError for a file that somebody else wrote."""
    try:
        there = file.path.read_text("utf-8")
    except FileNotFoundError:
        return "written"
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file.path}: cannot be read: {e}", hint="look at it") from e
    if there == file.text:
        return "unchanged"
    if units.MARK not in there:
        raise ConfigError(f"{file.path}: is there, and was not written by this command", hint="move it away, then try again")
    return "replaced"


def _write(file: UnitFile, state: str) -> None:
    if state == "unchanged":
        return
    new = file.path.with_name(f".{file.path.name}.new")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(file.text, "utf-8")
        new.chmod(0o644)
        new.replace(file.path)
    except PermissionError as e:
        raise ConfigError(f"{file.path}: {e.strerror}", hint="as root, or with --user for a service of your own") from e
    except OSError as e:
        raise StoreError(f"{file.path}: {e.strerror}", hint="look at that disk or path, then try again") from e


def _print_plan(args: argparse.Namespace, plan: Plan) -> None:
    if args.json:
        output.print_json({"dry_run": args.dry_run, **asdict(plan)})
        return
    for file in plan.files:
        print(f"{file.path}: {'would be ' if args.dry_run and file.state != 'unchanged' else ''}{file.state}")
        if args.dry_run and (args.user or file.path.suffix == ".conf"):
            print("\n".join(f"    {line}" for line in file.text.splitlines()))
    for note in plan.notes:
        print(output.clean(f"note: {note}"))
    print("then:", *plan.next, sep="\n    ")


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed of one ``unit`` in systemd's ``folder``: our ``files``, files that are ``kept`` with the reason, links that still start it."""

    folder: Path
    unit: str
    files: tuple[Path, ...]
    kept: tuple[str, ...]
    enabled: tuple[Path, ...]


def _uninstall(args: argparse.Namespace) -> int:
    """Remove the units that `_install` wrote, and print what was removed.  Raises ConfigError while the service is enabled: only its unit knows how to undo that."""
    found = _user_units(args) if args.user else _system_units(args)
    disable = f"systemctl {'--user ' if args.user else ''}disable --now {found.unit}"
    if found.enabled and not args.dry_run:
        raise ConfigError(f"{found.enabled[0]}: the service is enabled, and may be running", hint=f"{disable}, then try again")
    for path in () if args.dry_run else found.files:
        _remove(path)
    _print_removed(args, found, disable)
    return 0


def _system_units(args: argparse.Namespace) -> Installed:
    user = args.train or os.environ.get("SUDO_USER", "")
    if not (user or args.head):
        raise ConfigError("whose worker is not known", hint="--as USER, --head for the head, --user for a service of your own")
    if args.train and args.head:
        raise ConfigError("--as: a machine has one head", hint="leave it out, or leave out --head")
    unit = "ckptsync-head" if args.head else f"ckptsync-worker@{user}"
    own = SYSTEM / ("ckptsync-head.service" if args.head else "ckptsync-worker@.service")
    others = [] if args.head else _others(SYSTEM, unit)
    found = _installed(SYSTEM, unit, [SYSTEM / f"{unit}.service.d" / "10-ckptsync.conf", *([] if others else [own])])
    shared = f"{own}: {others[0]} is made from it, too" if others else ""
    return Installed(found.folder, unit, found.files, (*found.kept, *([shared] if shared else [])), found.enabled)


def _user_units(args: argparse.Namespace) -> Installed:
    if args.train:
        raise ConfigError("--as: a user's own systemd runs what is that user's", hint="leave it out, or leave out --user")
    folder = own_folder() / "systemd/user"
    unit = "ckptsync-head" if args.head else "ckptsync-worker"
    return _installed(folder, unit, [folder / f"{unit}.service"])


def _installed(folder: Path, unit: str, wanted: list[Path]) -> Installed:
    there = [path for path in wanted if path.is_file()]
    ours = tuple(path for path in there if _is_ours(path))
    kept = [f"{path}: was not written by this command" for path in there if path not in ours]
    kept += [f"{path}: your own" for path in sorted((folder / f"{unit}.service.d").glob("*")) if path not in wanted]
    return Installed(
        folder,
        unit,
        ours,
        tuple(kept),
        tuple(sorted(link for wants in folder.glob("*.wants") if (link := wants / f"{unit}.service").is_symlink())),
    )


def _others(folder: Path, unit: str) -> list[str]:
    """Return the workers of other users, which the same template makes."""
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


def _removal_notes(args: argparse.Namespace, found: Installed, disable: str) -> Iterator[str]:
    if found.enabled:  # only in a dry run
        yield f"{found.unit} is enabled: {disable} comes first"
    if not found.files:
        yield f"{found.folder}: holds nothing of {found.unit} that this command wrote"
    elif not found.enabled and not args.dry_run:
        yield f"if {found.unit} still runs it goes on: {disable.replace('disable --now', 'stop')}"
    yield "configurations, spools (_ckptsync) and the store are as they were"


def _print_removed(args: argparse.Namespace, found: Installed, disable: str) -> None:
    notes, following = list(_removal_notes(args, found, disable)), [f"systemctl {'--user ' if args.user else ''}daemon-reload"]
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
