"""``ckptsync service install`` and ``service uninstall``: write or remove systemd units.

They start and stop nothing: they print the commands that do.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from ckptsync.cli import output, systemd_units
from ckptsync.cli.arguments import add_command, add_dry_run, read_configuration
from ckptsync.config.yaml_lines import LIMIT
from ckptsync.doctor.directory_checks import user_name
from ckptsync.errors import ConfigError
from ckptsync.safe_open import read_named, replace_named
from ckptsync.worker.node_identity import node_id

SYSTEM = Path("/etc/systemd/system")
_HEADS_USER = "ckptsync"
_OF_ONE_USER = "--as: a user's own systemd runs only that user's services"


def add_arguments(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = add_command(
        actions,
        "install",
        "write systemd units for a configuration",
        "It starts nothing; it prints the commands that do.\n"
        "A configuration with the role worker gets ckptsync-worker@USER, another one"
        " ckptsync-head.",
    )
    install.set_defaults(action="install")
    install.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help="the service's configuration (default: /etc/ckptsync/USER.yaml; with --user,"
        " ~/.config/ckptsync/worker.yaml)",
    )
    install.add_argument(
        "--as",
        metavar="USER",
        dest="train",
        help="the user who trains (default: who called sudo), or who runs the head (default:"
        " ckptsync)",
    )
    install.add_argument(
        "--user", action="store_true", help="for your own systemd (systemctl --user), without root"
    )
    add_dry_run(install, "written")
    uninstall = add_command(
        actions,
        "uninstall",
        "remove the units that install wrote",
        "It stops nothing; it prints the commands that do. Other files, configurations, spools and"
        " the store stay.",
    )
    uninstall.set_defaults(action="uninstall")
    uninstall.add_argument(
        "--as",
        metavar="USER",
        dest="train",
        help="remove the worker of this user (default: who called sudo)",
    )
    uninstall.add_argument("--head", action="store_true", help="remove the head's units instead")
    uninstall.add_argument(
        "--user", action="store_true", help="remove units of your own systemd (systemctl --user)"
    )
    add_dry_run(uninstall, "removed")


def run(args: argparse.Namespace) -> int:
    """Write or remove the units, and print what was done."""
    return _install(args) if args.action == "install" else _uninstall(args)


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file to write.  ``state``: what was, or would be, done: written, replaced, unchanged."""

    path: Path
    text: str
    state: str


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """The files to write, what the operator should know, and the commands to run then."""

    files: tuple[UnitFile, ...]
    notes: tuple[str, ...]
    next: tuple[str, ...]


def _install(args: argparse.Namespace) -> int:
    plan = _user_plan(args) if args.user else _system_plan(args)
    for file in plan.files:
        if file.state != "unchanged" and not args.dry_run:
            _write(file)
    if args.json:
        output.print_json({"dry_run": args.dry_run, **asdict(plan)})
        return 0
    for file in plan.files:
        would = "would be " if args.dry_run and file.state != "unchanged" else ""
        print(f"{file.path}: {would}{file.state}")
        if args.dry_run and (args.user or file.path.suffix == ".conf"):
            print("\n".join(f"    {line}" for line in file.text.splitlines()))
    for note in plan.notes:
        output.say(f"note: {note}")
    print("then:", *plan.next, sep="\n    ")
    return 0


def _system_plan(args: argparse.Namespace) -> InstallPlan:
    """Plan the units of the machine's systemd.  Raises ConfigError."""
    given = args.train or os.environ.get("SUDO_USER", "")
    source = Path(args.config or f"/etc/ckptsync/{given or 'train'}.yaml").absolute()
    config = read_configuration(source, variables(source))
    is_worker = "worker" in config.roles
    name = given if is_worker else args.train or _HEADS_USER
    if not name:
        why = "the user who trains is not known: the worker runs as that user"
        hint = "name that user with --as USER, or give --user for a service of your own"
        raise ConfigError(why, hint=hint)
    try:
        pwd.getpwnam(name)
    except KeyError:
        make = f"useradd --system --user-group {name}"
        hint = "--as names the user who trains" if is_worker else make
        raise ConfigError(f"{name}: there is no such user", hint=hint) from None
    needed, notes = systemd_units.paths(config, [entry.pw_dir for entry in pwd.getpwall()])
    absent = [path for path in needed if not Path(path).is_dir()]
    if absent and not args.dry_run:
        raise ConfigError(
            f"{absent[0]}: does not exist, and a service cannot get access to an absent directory",
            hint=f"mount it, or make it: install -d -o {name} {absent[0]}",
        )
    unit = f"ckptsync-worker@{name}" if is_worker else "ckptsync-head"
    template = "ckptsync-worker@.service" if is_worker else "ckptsync-head.service"
    runner = "" if is_worker or name == _HEADS_USER else name
    program = _program(source)
    drop_in = systemd_units.drop_in(config, program, needed, runner)
    files = (
        _planned(SYSTEM / template, systemd_units.copied(_template(template))),
        _planned(SYSTEM / f"{unit}.service.d" / "10-ckptsync.conf", drop_in),
    )
    notes += [f"{path}: does not exist yet" for path in absent]
    others = {path.name for path in SYSTEM.glob("ckptsync-worker@*.service.d")}
    if is_worker and not config.node and others - {f"{unit}.service.d"}:
        remedy = f"node: {node_id()}-{name}"
        notes.append(f"{source}: several workers on one machine need a node name each: {remedy}")
    doctor = shlex.join([*program.caller, "doctor", "-c", str(source)])
    enable = ("systemctl daemon-reload", f"systemctl enable --now {unit}")
    return InstallPlan(files, tuple(notes), (f"sudo -u {name} {doctor}", *enable))


def _user_plan(args: argparse.Namespace) -> InstallPlan:
    """Plan the unit of a user's own systemd.  Raises ConfigError."""
    home = _own_folder()
    if args.train:
        raise ConfigError(_OF_ONE_USER, hint="leave --as out, or leave out --user")
    source = Path(args.config or home / "ckptsync/worker.yaml").absolute()
    is_worker = "worker" in read_configuration(source, variables(source)).roles
    unit = "ckptsync-worker" if is_worker else "ckptsync-head"
    template = _template("ckptsync-worker@.service" if is_worker else "ckptsync-head.service")
    text = systemd_units.for_user(template, _program(source))
    note = (
        "a user's own systemd cannot sandbox the service; without lingering it ends with the last"
        " session"
    )
    enable = ("systemctl --user daemon-reload", f"systemctl --user enable --now {unit}")
    file = _planned(home / f"systemd/user/{unit}.service", text)
    return InstallPlan((file,), (note,), (*enable, f"loginctl enable-linger {getpass.getuser()}"))


def _own_folder() -> Path:
    """Return where this user's configuration is.

    Raises ConfigError if it is another user's, as under sudo.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    owner = next(path for path in (home, *home.absolute().parents) if path.exists()).stat().st_uid
    if owner != os.geteuid() == 0:
        name = user_name(owner)
        why = f"--user: {home} is {name}'s, and this is root"
        raise ConfigError(why, hint=f"run it as {name}, without sudo")
    return home


def variables(source: Path) -> Mapping[str, str]:
    """Return the variables of the file beside a configuration.

    The service has these, and not this shell's.
    """
    try:
        content = read_named(f"{str(source).removesuffix('.yaml')}.env", LIMIT)
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # the unit allows that it is absent; systemd says so if it cannot be read
    set_lines = (line for line in lines if "=" in line and not line.startswith(("#", ";")))
    pairs = (line.partition("=") for line in set_lines)
    return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}


def _program(source: Path) -> systemd_units.Program:
    """Return the program that runs now, as it was called."""
    own = Path(sys.argv[0])
    found = own if own.is_absolute() else Path(shutil.which(sys.argv[0]) or own)
    is_script = found.name == "ckptsync" and os.access(found, os.X_OK)
    caller = (str(found.absolute()),) if is_script else (sys.executable, "-m", "ckptsync")
    resolved = [str(Path(path).resolve()) for path in (caller[0], sys.executable)]
    seen = (*resolved, sys.prefix, sys.base_prefix)
    return systemd_units.Program(caller, str(source), seen)


def _template(unit: str) -> str:
    return resources.files("ckptsync").joinpath("systemd").joinpath(unit).read_text("utf-8")


def _planned(path: Path, text: str) -> UnitFile:
    """Return a file and what writing it would do.

    Raises ConfigError for a file that this command did not write.
    """
    there = _read(path)
    if there is None:
        return UnitFile(path, text, "written")
    if there != text and systemd_units.MARK not in there:
        hint = "move it away, then try again"
        raise ConfigError(f"{path}: exists, and was not written by this command", hint=hint)
    return UnitFile(path, text, "unchanged" if there == text else "replaced")


def _read(path: Path) -> str | None:
    """Return the text of a unit; ``None`` if there is none, "" for a directory."""
    try:
        with _hint_of_rights(path):
            return read_named(path, LIMIT).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return ""


def _write(file: UnitFile) -> None:
    with _hint_of_rights(file.path):
        file.path.parent.mkdir(parents=True, exist_ok=True)
        replace_named(file.path, file.text.encode())


@contextlib.contextmanager
def _hint_of_rights(path: Path) -> Iterator[None]:
    """Raise ConfigError where this user may not do it; `main` reports other errors."""
    try:
        yield
    except PermissionError as e:
        hint = "run this as root, or with --user for a service of your own"
        raise ConfigError(f"{path}: {e.strerror}", hint=hint) from e


def _uninstall(args: argparse.Namespace) -> int:
    """Remove the units that `_install` wrote.

    Raises ConfigError while the service is enabled: only its unit says how to disable it.
    """
    folder, unit, files, kept = _installed(args)
    texts = {path: text for path in files if (text := _read(path)) is not None}
    ours = [path for path, text in texts.items() if systemd_units.MARK in text]
    kept = [*(f"{p}: was not written by this command" for p in texts if p not in ours), *kept]
    own = sorted(path for path in (folder / f"{unit}.service.d").glob("*") if path not in files)
    kept += [f"{path}: your own" for path in own]
    links = (wants / f"{unit}.service" for wants in folder.glob("*.wants"))
    enabled = sorted(link for link in links if link.is_symlink())
    systemctl = "systemctl --user" if args.user else "systemctl"
    disable = f"{systemctl} disable --now {unit}"
    if enabled and not args.dry_run:
        why = f"{enabled[0]}: the service is enabled, and may be running"
        raise ConfigError(why, hint=f"{disable}, then try again")
    for path in () if args.dry_run else ours:
        with _hint_of_rights(path):
            path.unlink()
            if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
                path.parent.rmdir()
    notes = []
    if enabled:  # only in a dry run
        notes.append(f"{unit} is enabled: {disable} comes first")
    if not ours:
        notes.append(f"{folder}: holds nothing of {unit} that this command wrote")
    elif not enabled and not args.dry_run:
        notes.append(f"if {unit} is running, it keeps running until {systemctl} stop {unit}")
    notes.append("configurations, spools (_ckptsync) and the store were not changed")
    following = f"{systemctl} daemon-reload"
    if args.json:
        removed = {"dry_run": args.dry_run, "removed": list(map(str, ours)), "unit": unit}
        output.print_json({**removed, "kept": kept, "notes": notes, "next": [following]})
        return 0
    for path in ours:
        print(f"{path}: {'would be ' if args.dry_run else ''}removed")
    for line in [*(f"kept {line}" for line in kept), *(f"note: {note}" for note in notes)]:
        output.say(line)
    print("then:", following, sep="\n    ")
    return 0


def _installed(args: argparse.Namespace) -> tuple[Path, str, list[Path], list[str]]:
    """Return systemd's folder, the unit's name, its files, and why its template stays.

    Raises ConfigError if the user is not clear.
    """
    if args.user:
        if args.train:
            raise ConfigError(_OF_ONE_USER, hint="leave --as out, or leave out --user")
        folder = _own_folder() / "systemd/user"
        unit = "ckptsync-head" if args.head else "ckptsync-worker"
        return folder, unit, [folder / f"{unit}.service"], []
    user = args.train or os.environ.get("SUDO_USER", "")
    if not (user or args.head):
        hint = "--as USER, --head for the head, --user for a service of your own"
        raise ConfigError("no user is named whose worker to remove", hint=hint)
    if args.train and args.head:
        hint = "leave --as out, or leave out --head"
        raise ConfigError("--as: a machine has one head", hint=hint)
    unit = "ckptsync-head" if args.head else f"ckptsync-worker@{user}"
    template = SYSTEM / ("ckptsync-head.service" if args.head else "ckptsync-worker@.service")
    drop_in = SYSTEM / f"{unit}.service.d" / "10-ckptsync.conf"
    # other users' workers, which systemd makes from the same template
    drop_ins = SYSTEM.glob("ckptsync-worker@?*.service.d/10-ckptsync.conf")
    workers = {path.parent.name.removesuffix(".d") for path in drop_ins if path.is_file()}
    workers |= {path.name for path in SYSTEM.glob("*.wants/ckptsync-worker@?*.service")}
    if others := [] if args.head else sorted(workers - {f"{unit}.service"}):
        return SYSTEM, unit, [drop_in], [f"{template}: {others[0]} still uses it"]
    return SYSTEM, unit, [drop_in, template], []
