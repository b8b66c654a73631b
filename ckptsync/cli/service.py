"""``ckptsync service install`` and ``service uninstall``: write or remove systemd units.

They start and stop nothing: they print the commands that do.
"""

from __future__ import annotations

import argparse
import getpass
import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from ckptsync.cli import output, systemd_units
from ckptsync.cli.arguments import add_command, add_dry_run, read_configuration
from ckptsync.doctor.directories import user_name
from ckptsync.errors import CkptsyncError, ConfigError, StoreError
from ckptsync.worker.node_identity import node_id

SYSTEM = Path("/etc/systemd/system")
DETAILS = ""
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
    install.set_defaults(command=_install)
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
        "It stops nothing; it prints the commands that do.  Other files, configurations, spools and"
        " the store stay.",
    )
    uninstall.set_defaults(command=_uninstall)
    uninstall.add_argument(
        "--as", metavar="USER", dest="train", help="whose worker (default: who called sudo)"
    )
    uninstall.add_argument("--head", action="store_true", help="the head's units instead")
    uninstall.add_argument(
        "--user", action="store_true", help="units of your own systemd (systemctl --user)"
    )
    add_dry_run(uninstall, "removed")


def run(args: argparse.Namespace) -> int:
    """Run the action that was chosen."""
    return int(args.command(args))


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
    """Write the units for a configuration, and print what was written."""
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
    found = systemd_units.paths(config, [entry.pw_dir for entry in pwd.getpwall()])
    absent = [path for path in found.needed if not Path(path).is_dir()]
    if absent and not args.dry_run:
        raise ConfigError(
            f"{absent[0]}: does not exist, and a service cannot get access to an absent directory",
            hint=f"mount it, or make it: install -d -o {name} {absent[0]}",
        )
    unit = f"ckptsync-worker@{name}" if is_worker else "ckptsync-head"
    template = "ckptsync-worker@.service" if is_worker else "ckptsync-head.service"
    runner = "" if is_worker or name == _HEADS_USER else name
    program = _program(source)
    drop_in = systemd_units.drop_in(config, program, found, runner)
    files = (
        _planned(SYSTEM / template, systemd_units.copied(_template(template))),
        _planned(SYSTEM / f"{unit}.service.d" / "10-ckptsync.conf", drop_in),
    )
    notes = [*found.notes, *(f"{path}: does not exist yet" for path in absent)]
    others = {path.name for path in SYSTEM.glob("ckptsync-worker@*.service.d")}
    if is_worker and not config.node and others - {f"{unit}.service.d"}:
        remedy = f"node: {node_id()}-{name}"
        notes.append(f"{source}: several workers on one machine need a node's name each: {remedy}")
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
        lines = Path(f"{str(source).removesuffix('.yaml')}.env").read_text("utf-8").splitlines()
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
    try:
        there = path.read_text("utf-8")
    except FileNotFoundError:
        return UnitFile(path, text, "written")
    except (OSError, UnicodeDecodeError) as e:
        hint = "move it away, or run this as root"
        raise ConfigError(f"{path}: cannot be read: {e}", hint=hint) from e
    if there != text and systemd_units.MARK not in there:
        hint = "move it away, then try again"
        raise ConfigError(f"{path}: exists, and was not written by this command", hint=hint)
    return UnitFile(path, text, "unchanged" if there == text else "replaced")


def _write(file: UnitFile) -> None:
    new = file.path.with_name(f".{file.path.name}.new")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(file.text, "utf-8")
        new.chmod(0o644)
        new.replace(file.path)
    except OSError as e:
        raise _refused(file.path, e) from e


def _refused(path: Path, error: OSError) -> CkptsyncError:
    if isinstance(error, PermissionError):
        hint = "run this as root, or with --user for a service of your own"
        return ConfigError(f"{path}: {error.strerror}", hint=hint)
    return StoreError(f"{path}: {error.strerror}", hint="look at that disk or path, then try again")


@dataclass(frozen=True, slots=True)
class Installed:
    """The files of a ``unit`` in systemd's ``folder``: ``ours``, those ``kept``, enabling links."""

    folder: Path
    unit: str
    ours: list[Path]
    kept: list[str]
    enabled: list[Path]


def _uninstall(args: argparse.Namespace) -> int:
    """Remove the units that `_install` wrote, and print what was removed.

    Raises ConfigError while the service is enabled: only its unit says how to disable it.
    """
    found = _installed(args)
    systemctl = "systemctl --user" if args.user else "systemctl"
    disable = f"{systemctl} disable --now {found.unit}"
    if found.enabled and not args.dry_run:
        why = f"{found.enabled[0]}: the service is enabled, and may be running"
        raise ConfigError(why, hint=f"{disable}, then try again")
    for path in () if args.dry_run else found.ours:
        try:
            path.unlink()
            if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
                path.parent.rmdir()
        except OSError as e:  # noqa: PERF203 - the first one ends it
            raise _refused(path, e) from e
    notes = []
    if found.enabled:  # only in a dry run
        notes.append(f"{found.unit} is enabled: {disable} comes first")
    if not found.ours:
        notes.append(f"{found.folder}: holds nothing of {found.unit} that this command wrote")
    elif not found.enabled and not args.dry_run:
        notes.append(f"if {found.unit} still runs it goes on: {systemctl} stop {found.unit}")
    notes.append("configurations, spools (_ckptsync) and the store are as they were")
    following = f"{systemctl} daemon-reload"
    if args.json:
        ours = list(map(str, found.ours))
        removed = {"dry_run": args.dry_run, "removed": ours, "unit": found.unit}
        output.print_json({**removed, "kept": found.kept, "notes": notes, "next": [following]})
        return 0
    for path in found.ours:
        print(f"{path}: {'would be ' if args.dry_run else ''}removed")
    for line in [*(f"kept {line}" for line in found.kept), *(f"note: {note}" for note in notes)]:
        output.say(line)
    print("then:", following, sep="\n    ")
    return 0


def _installed(args: argparse.Namespace) -> Installed:
    """Find what is installed.  Raises ConfigError if it is not clear of whom."""
    kept = []
    if args.user:
        if args.train:
            raise ConfigError(_OF_ONE_USER, hint="leave --as out, or leave out --user")
        folder = _own_folder() / "systemd/user"
        unit = "ckptsync-head" if args.head else "ckptsync-worker"
        files = [folder / f"{unit}.service"]
    else:
        folder, user = SYSTEM, args.train or os.environ.get("SUDO_USER", "")
        if not (user or args.head):
            hint = "--as USER, --head for the head, --user for a service of your own"
            raise ConfigError("it is not known whose worker to remove", hint=hint)
        if args.train and args.head:
            hint = "leave --as out, or leave out --head"
            raise ConfigError("--as: a machine has one head", hint=hint)
        unit = "ckptsync-head" if args.head else f"ckptsync-worker@{user}"
        template = folder / ("ckptsync-head.service" if args.head else "ckptsync-worker@.service")
        files = [folder / f"{unit}.service.d" / "10-ckptsync.conf"]
        # other users' workers, which systemd makes from the same template
        drop_ins = folder.glob("ckptsync-worker@?*.service.d/10-ckptsync.conf")
        users = {path.parent.name.removesuffix(".d") for path in drop_ins if path.is_file()}
        users |= {path.name for path in folder.glob("*.wants/ckptsync-worker@?*.service")}
        if others := [] if args.head else sorted(users - {f"{unit}.service"}):
            kept.append(f"{template}: {others[0]} is made from it, too")
        else:
            files.append(template)
    ours = []
    for path in files:
        try:
            is_ours = systemd_units.MARK in path.read_text("utf-8")
        except (FileNotFoundError, IsADirectoryError):
            continue
        except UnicodeDecodeError:
            is_ours = False
        except OSError as e:
            raise _refused(path, e) from e
        if is_ours:
            ours.append(path)
        else:
            kept.insert(0, f"{path}: was not written by this command")
    own = sorted(path for path in (folder / f"{unit}.service.d").glob("*") if path not in files)
    links = (wants / f"{unit}.service" for wants in folder.glob("*.wants"))
    enabled = sorted(link for link in links if link.is_symlink())
    return Installed(folder, unit, ours, [*kept, *(f"{path}: your own" for path in own)], enabled)
