"""``ckptsync service install`` and ``service uninstall``: copy or remove systemd units.

An operator wants sandboxed units without writing them.  The units in ``systemd/`` are the same for
everybody, except the path of the program.  What a configuration needs beyond them is printed, for
`systemctl edit`.  Neither command starts or stops anything: they print the commands that do.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import pwd
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from ckptsync.cli import output
from ckptsync.cli.arguments import add_command, add_dry_run, read_configuration
from ckptsync.config.output_dirs import local_directory
from ckptsync.config.schema import Config
from ckptsync.config.yaml_lines import LIMIT
from ckptsync.doctor.directory_checks import user_name
from ckptsync.errors import ConfigError
from ckptsync.safe_open import read_named, replace_named
from ckptsync.worker.node_identity import node_id

SYSTEM = Path("/etc/systemd/system")
CONFIGS = Path("/etc/ckptsync")
HEAD, HEAD_USER = "ckptsync-head", "ckptsync"
_PROGRAM = "/opt/ckptsync/bin/ckptsync"  # in the units, replaced by the program that runs this
_MARK = "# Written by `ckptsync service install`: it will be replaced.  Changes: `systemctl edit`."
_DROP_IN = "10-ckptsync.conf"
_FIXED = re.compile(r"[^*?[]*(?=/)")  # the directories before the first one with a wildcard
_HOMES = ("/", "/home", "/root")
_UNIT_MEMORY = 256 << 20  # the greatest limits.memory that the unit's MemoryHigh has room for
_UNIT_THREADS = 24  # the greatest limits.threads that the unit's TasksMax has room for
_OF_ONE_USER = "--as: a user's own systemd runs only that user's services"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = add_command(
        actions,
        "install",
        "copy the systemd unit of a configuration",
        "It starts nothing; it prints the commands that do.\n"
        "A configuration with the role worker gets ckptsync-worker@USER, another one"
        f" {HEAD}. What it needs beyond the unit is named: say that in `systemctl edit`.",
    )
    install.set_defaults(action="install")
    install.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help=f"the service's configuration: {CONFIGS}/USER.yaml (default), or head.yaml beside it;"
        " with --user, ~/.config/ckptsync/worker.yaml (default), or head.yaml beside it",
    )
    install.add_argument(
        "--as",
        metavar="USER",
        dest="train",
        help="the user who trains (default: the name of CONFIG, or who called sudo)",
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
    uninstall.add_argument("--head", action="store_true", help="remove the head's unit instead")
    uninstall.add_argument(
        "--user", action="store_true", help="remove a unit of your own systemd (systemctl --user)"
    )
    add_dry_run(uninstall, "removed")


def run(args: argparse.Namespace) -> int:
    """Write or remove the units, and print what was done; return 0.  Raises ConfigError."""
    return _install(args) if args.action == "install" else _uninstall(args)


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file of systemd, and what is done to it.

    ``state``: written, replaced, unchanged or removed.
    """

    path: Path
    text: str
    state: str


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """The files to write, notes for the operator, and the commands to run ``next``."""

    files: tuple[UnitFile, ...]
    notes: tuple[str, ...]
    next: tuple[str, ...]


def _install(args: argparse.Namespace) -> int:
    """Write, replace or remove the plan's files, unless it is a dry run, and print it; return 0.

    Absent directories are made.  Raises ConfigError, also without the right to write.
    """
    plan = _user_plan(args) if args.user else _system_plan(args)
    for file in () if args.dry_run else plan.files:
        with _permissions_hinted(file.path):
            if file.state == "removed":
                file.path.unlink()
            elif file.state != "unchanged":
                file.path.parent.mkdir(parents=True, exist_ok=True)
                replace_named(file.path, file.text.encode())
    if args.json:
        output.print_json({"dry_run": args.dry_run, **asdict(plan)})
        return 0
    for file in plan.files:
        would = "would be " if args.dry_run and file.state != "unchanged" else ""
        print(f"{file.path}: {would}{file.state}")
    for note in plan.notes:
        output.say(f"note: {note}")
    print("then:", *plan.next, sep="\n    ")
    return 0


def _system_plan(args: argparse.Namespace) -> InstallPlan:
    """Return the plan for the machine's systemd; write nothing.

    Without ``-c`` the configuration is that of ``--as``, else of ``$SUDO_USER``, else of "train".
    Raises ConfigError for ``--as`` without the role worker, a configuration that the unit does not
    read, a user that does not exist, a file that another program wrote, and, unless it is a dry
    run, for a directory that does not exist.
    """
    default = args.train or os.environ.get("SUDO_USER") or "train"
    source = Path(args.config or CONFIGS / f"{default}.yaml").absolute()
    config = read_configuration(source, variables(source))
    is_worker = "worker" in config.roles
    if args.train and not is_worker:
        why = f"--as: {source} has no worker, and a head runs as the user {HEAD_USER}"
        hint = f"`systemctl edit {HEAD}` names another user: [Service], User=, Group="
        raise ConfigError(why, hint=hint)
    user = (args.train or source.stem) if is_worker else HEAD_USER
    _check_source(source, CONFIGS / f"{user if is_worker else 'head'}.yaml")
    try:
        pwd.getpwnam(user)
    except KeyError:
        add_user = f"useradd --system --user-group {user}"
        hint = f"{source} is named after the user who trains" if is_worker else add_user
        raise ConfigError(f"{user}: there is no such user", hint=hint) from None
    writable = _list_writable(config)
    absent = [path for path in writable if not Path(path).is_dir()]
    if absent and not args.dry_run:
        raise ConfigError(
            f"{absent[0]}: does not exist, and a service cannot get access to an absent directory",
            hint=f"mount it, or make it: install -d -o {user} {absent[0]}",
        )
    unit = f"ckptsync-worker@{user}" if is_worker else HEAD
    template = "ckptsync-worker@.service" if is_worker else f"{HEAD}.service"
    text = _unit_text(template)
    files = [_plan_file(SYSTEM / template, text)]
    if is_worker:
        has_head = len(config.roles) > 1
        files += _plan_drop_in(SYSTEM / f"{unit}.service.d" / _DROP_IN, is_needed=has_head)
    edits = _list_edits(config, text, writable)
    notes = [f"{path}: does not exist yet" for path in absent]
    if edits:
        notes.append(f"{source}: needs more than the unit allows: {'; '.join(edits)}")
    if is_worker and not config.node and _list_workers() - {unit}:
        remedy = f"node: {node_id()}-{user}"
        notes.append(f"{source}: several workers on one machine need a node name each: {remedy}")
    edit = [f"systemctl edit {unit}"] if edits else []
    doctor = f"sudo -u {user} {shlex.join([_program_path(), 'doctor', '-c', str(source)])}"
    start = ("systemctl daemon-reload", f"systemctl enable --now {unit}")
    return InstallPlan(tuple(files), tuple(notes), (doctor, *edit, *start))


def _user_plan(args: argparse.Namespace) -> InstallPlan:
    """Return the plan for a user's own systemd; write nothing.

    Raises ConfigError for ``--as``, a configuration that the unit does not read, a file that
    another program wrote, and as `_own_folder`.
    """
    home = _own_folder()
    if args.train:
        raise ConfigError(_OF_ONE_USER, hint="leave --as out, or leave out --user")
    source = Path(args.config or home / "ckptsync/worker.yaml").absolute()
    role = "worker" if "worker" in read_configuration(source, variables(source)).roles else "head"
    _check_source(source, home / f"ckptsync/{role}.yaml")
    unit = f"ckptsync-{role}"
    file = _plan_file(home / f"systemd/user/{unit}.service", _unit_text("user/ckptsync.service"))
    note = (
        "a user's own systemd cannot sandbox the service; without lingering it ends with the last"
        " session"
    )
    enable = ("systemctl --user daemon-reload", f"systemctl --user enable --now {unit}")
    return InstallPlan((file,), (note,), (*enable, f"loginctl enable-linger {getpass.getuser()}"))


def _own_folder() -> Path:
    """Return this user's directory of configurations, ``$XDG_CONFIG_HOME`` or ``~/.config``.

    Raises ConfigError if root runs this and it is another user's, as under sudo.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    owner = next(path for path in (home, *home.absolute().parents) if path.exists()).stat().st_uid
    if owner != os.geteuid() == 0:
        name = user_name(owner)
        why = f"--user: {home} is {name}'s, and this is root"
        raise ConfigError(why, hint=f"run it as {name}, without sudo")
    return home


def variables(source: Path) -> Mapping[str, str]:
    """Return the variables of the ``.env`` file beside a configuration; none if it is unreadable.

    systemd gives the service these, and not the variables of this shell.  Quotes around values are
    removed; comments and lines without ``=`` are passed over.
    """
    try:
        content = read_named(f"{str(source).removesuffix('.yaml')}.env", LIMIT)
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}  # it is optional; systemd reports one that cannot be read
    set_lines = (line for line in lines if "=" in line and not line.startswith(("#", ";")))
    pairs = (line.partition("=") for line in set_lines)
    return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}


def _check_source(source: Path, expected: Path) -> None:
    """Raise ConfigError if the unit reads another configuration than ``source``."""
    if source.resolve() != expected.resolve():
        raise ConfigError(
            f"-c {source}: the unit reads {expected}",
            hint=f"mv {shlex.join([str(source), str(expected)])}, or change ExecStart= and"
            " EnvironmentFile= by `systemctl edit`",
        )


def _list_writable(config: Config) -> list[str]:
    """Return the directories that a service must be able to write to, sorted.

    They are those above the output directories and before any wildcard, and the store's.  Below
    /tmp that is /tmp; directly in a root or home directory it is the output directory itself.
    Raises ConfigError if a pattern would need all of `_HOMES`.
    """
    paths = set()
    for run in config.worker.runs if "worker" in config.roles else ():
        match = _FIXED.match(run.path)
        fixed = (match[0] if match else "") or "/"
        is_pattern = bool(re.search(r"[*?[]", run.path))
        if is_pattern and fixed in _HOMES:
            why = f"{run.path}: all of {fixed} would be writable for the service"
            hint = "let the jobs write below a directory of their own, such as /data/out/*"
            raise ConfigError(why, hint=hint)
        is_broad = not is_pattern and str(Path(fixed).parent) in _HOMES
        paths.add("/tmp" if fixed.startswith("/tmp/") else run.path if is_broad else fixed)  # noqa: S108
    if local := local_directory(config.store.url):
        paths.add(local.rstrip("/") or "/")
    return sorted(paths)


def _list_edits(config: Config, unit: str, writable: list[str]) -> list[str]:
    """Return the settings, as text, that a configuration needs and the unit's text lacks.

    ``unit``: the text of an installed template, which has one line ``ReadWritePaths=``.
    """
    (listed,) = re.findall("^ReadWritePaths=(.*)", unit, re.MULTILINE)
    roots = [Path(path.lstrip("-")) for path in listed.split()]
    missing = [path for path in writable if not any(Path(path).is_relative_to(r) for r in roots)]
    edits = []
    if missing:
        words = shlex.join(missing)
        edits.append(f"[Unit] RequiresMountsFor={words} [Service] ReadWritePaths={words}")
    if config.limits.memory > _UNIT_MEMORY:
        megabytes = (config.limits.memory - _UNIT_MEMORY) >> 20
        edits.append(f"[Service] MemoryHigh= and MemoryMax=: {megabytes}M more than the unit has")
    if config.limits.threads > _UNIT_THREADS:
        edits.append(f"[Service] TasksMax={256 + 4 * config.limits.threads}")
    return edits


def _program_path() -> str:
    """Return the absolute path of the running ``ckptsync``, or of that beside the interpreter.

    Raises ConfigError if it is not executable, or has characters that no unit can have.
    """
    program = Path(shutil.which(sys.argv[0]) or sys.argv[0])
    beside = Path(sys.executable).with_name("ckptsync")
    path = str((program if program.name == "ckptsync" else beside).absolute())
    if not os.access(path, os.X_OK) or not re.fullmatch(r"[\w@+=:,./-]+", path):
        hint = "install it elsewhere: python3 -m venv /opt/ckptsync"
        raise ConfigError(f"{path}: no program that a unit can name", hint=hint)
    return path


def _unit_text(name: str) -> str:
    """Return a marked file of ``systemd/`` with this program's path.  Raises as `_program_path`."""
    text = resources.files("ckptsync").joinpath("systemd").joinpath(name).read_text("utf-8")
    return f"{_MARK}\n{text.replace(_PROGRAM, _program_path())}"


def _plan_file(path: Path, text: str) -> UnitFile:
    """Return a file with what writing it would do.

    Raises ConfigError if another program wrote the file that exists.
    """
    old_text = _read_unit(path)
    if old_text is None:
        return UnitFile(path, text, "written")
    if old_text != text and _MARK not in old_text:
        hint = "move it away, then try again"
        raise ConfigError(f"{path}: exists, and was not written by this command", hint=hint)
    return UnitFile(path, text, "unchanged" if old_text == text else "replaced")


def _plan_drop_in(path: Path, *, is_needed: bool) -> list[UnitFile]:
    """Return the drop-in of a worker that is also a head; one to remove if it is not needed.

    Raises ConfigError if another program wrote it, or it may not be read.
    """
    if is_needed:
        return [_plan_file(path, _unit_text("with-head.conf"))]
    return [UnitFile(path, "", "removed")] if _MARK in (_read_unit(path) or "") else []


def _list_workers() -> set[str]:
    """Return the units of this machine's workers that are enabled, or have a drop-in."""
    links = SYSTEM.glob("*.wants/ckptsync-worker@?*.service")
    folders = SYSTEM.glob("ckptsync-worker@?*.service.d")
    return {path.name.removesuffix(".d").removesuffix(".service") for path in (*links, *folders)}


def list_written_units() -> list[Path]:
    """Return the files that install wrote, for system and user.  Raises as `_read_unit`."""
    candidates = [
        path
        for folder in _unit_folders()
        for pattern in ("ckptsync-*.service", f"ckptsync-*.service.d/{_DROP_IN}")
        for path in sorted(folder.glob(pattern))
    ]
    return [path for path in candidates if _MARK in (_read_unit(path) or "")]


def list_enabled() -> list[str]:
    """Return the commands that disable the enabled ckptsync services; [] if none is enabled."""
    return [
        f"systemctl{'' if folder == SYSTEM else ' --user'} disable --now {link.stem}"
        for folder in _unit_folders()
        for link in sorted(folder.glob("*.wants/ckptsync-*.service"))
    ]


def list_configurations() -> list[Path]:
    """Return the configurations, with their ``.env`` files, of the system and of this user."""
    folders = [CONFIGS, *(folder.parents[1] / "ckptsync" for folder in _unit_folders()[1:])]
    return [
        path
        for folder in folders
        for pattern in ("*.yaml", "*.env")
        for path in sorted(folder.glob(pattern))
    ]


def _unit_folders() -> list[Path]:
    """Return the directories of units: the system's, and this user's own if it is this user's."""
    try:
        return [SYSTEM, _own_folder() / "systemd/user"]
    except (ConfigError, RuntimeError):  # another user's home, or none
        return [SYSTEM]


def _read_unit(path: Path) -> str | None:
    """Return the text of a file; None if there is none, "" for a directory.

    Bytes that are no UTF-8 are replaced.  Raises ConfigError without the right to read it, else
    OSError.
    """
    try:
        with _permissions_hinted(path):
            return read_named(path, LIMIT).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return ""


@contextlib.contextmanager
def _permissions_hinted(path: Path) -> Iterator[None]:
    """Within the block, raise a PermissionError as ConfigError with a hint at ``--user``."""
    try:
        yield
    except PermissionError as e:
        hint = "run this as root, or with --user for a service of your own"
        raise ConfigError(f"{path}: {e.strerror}", hint=hint) from e


def _uninstall(args: argparse.Namespace) -> int:
    """Remove the files that `_install` wrote, unless it is a dry run, and print that; return 0.

    Files of others stay; a drop-in directory that becomes empty goes.  Raises ConfigError while the
    service is enabled (systemd needs the unit to disable it), or without the right to remove.
    """
    folder, unit, files, kept_lines = _find_installed(args)
    texts = {path: text for path in files if (text := _read_unit(path)) is not None}
    own_files = [path for path, text in texts.items() if _MARK in text]
    kept_lines = [
        *(f"{p}: was not written by this command" for p in texts if p not in own_files),
        *kept_lines,
    ]
    operator_files = sorted(
        path for path in (folder / f"{unit}.service.d").glob("*") if path not in files
    )
    kept_lines += [f"{path}: your own" for path in operator_files]
    links = (wants_dir / f"{unit}.service" for wants_dir in folder.glob("*.wants"))
    enabled = sorted(link for link in links if link.is_symlink())
    systemctl = "systemctl --user" if args.user else "systemctl"
    disable = f"{systemctl} disable --now {unit}"
    if enabled and not args.dry_run:
        why = f"{enabled[0]}: the service is enabled, and may be running"
        raise ConfigError(why, hint=f"{disable}, then try again")
    for path in () if args.dry_run else own_files:
        with _permissions_hinted(path):
            path.unlink()
            if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
                path.parent.rmdir()
    notes = []
    if enabled:  # only in a dry run
        notes.append(f"{unit} is enabled: {disable} comes first")
    if not own_files:
        notes.append(f"{folder}: holds nothing of {unit} that this command wrote")
    elif not enabled and not args.dry_run:
        notes.append(f"if {unit} is running, it keeps running until {systemctl} stop {unit}")
    notes.append("configurations, spools (_ckptsync) and the store were not changed")
    output.print_removal(
        args, own_files, kept_lines, notes, [f"{systemctl} daemon-reload"], unit=unit
    )
    return 0


def _find_installed(args: argparse.Namespace) -> tuple[Path, str, list[Path], list[str]]:
    """Return systemd's directory, the unit's name, its files, and why its template stays.

    The last is empty if it does not stay.  Raises ConfigError if it is not clear which user's unit
    is meant.
    """
    if args.user:
        if args.train:
            raise ConfigError(_OF_ONE_USER, hint="leave --as out, or leave out --user")
        folder = _own_folder() / "systemd/user"
        unit = HEAD if args.head else "ckptsync-worker"
        return folder, unit, [folder / f"{unit}.service"], []
    user = args.train or os.environ.get("SUDO_USER", "")
    if not (user or args.head):
        hint = "--as USER, --head for the head, --user for a service of your own"
        raise ConfigError("no user is named whose worker to remove", hint=hint)
    if args.train and args.head:
        hint = "leave --as out, or leave out --head"
        raise ConfigError("--as: a machine has one head", hint=hint)
    unit = HEAD if args.head else f"ckptsync-worker@{user}"
    template = SYSTEM / (f"{HEAD}.service" if args.head else "ckptsync-worker@.service")
    drop_in = SYSTEM / f"{unit}.service.d" / _DROP_IN
    # systemd makes other users' workers from the same template
    if other_workers := [] if args.head else sorted(_list_workers() - {unit}):
        return SYSTEM, unit, [drop_in], [f"{template}: {other_workers[0]} still uses it"]
    return SYSTEM, unit, [drop_in, template], []
