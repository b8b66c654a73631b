"""From a configuration to the text of systemd's units.  Pure.

What does not depend on the configuration is in ``systemd/``, the rest in a drop-in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptsync.config.output_dirs import local_directory
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError

MARK = "Written by `ckptsync service install`"
_MAGIC = frozenset("*?[")
# emptied at a boot, or before: a directory below may not be there when a service starts
_EMPTIED = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108
_BROAD = ("/", "/home", "/root", "/var", "/opt", "/usr", "/etc")
_OWN_MEMORY = 256 << 20  # of limits.memory: what the unit's own MemoryHigh leaves room for
_OWN_THREADS = 24  # of limits.threads, by TasksMax
_SERVICE_KEYS = """
    Type NotifyAccess ExecReload UMask Restart RestartSec RestartPreventExitStatus WatchdogSec
    LimitCORE TimeoutStopSec TimeoutAbortSec KillMode Nice CPUWeight IOWeight
    IOSchedulingClass IOSchedulingPriority
    MemoryHigh MemoryMax OOMScoreAdjust TasksMax Environment NoNewPrivileges LockPersonality
    MemoryDenyWriteExecute RestrictRealtime RestrictSUIDSGID SystemCallArchitectures
"""
_OF_USERS = {"Unit": ("Description",), "Service": tuple(_SERVICE_KEYS.split())}
"""The settings that a user's own systemd can honour: no mounts, no capabilities, no other user."""


@dataclass(frozen=True, slots=True)
class Program:
    """How the service is started.

    ``caller``: the words that call ``ckptsync``.  ``source``: the configuration's path.  ``seen``:
    what else the service must see.
    """

    caller: tuple[str, ...]
    source: str
    seen: tuple[str, ...] = ()


def paths(config: Config, homes: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return the directories that a service needs at its start, and notes for the operator.

    They are the output directories' parents and the store, none of them within another.  Raises
    ConfigError where all of a home, or of the system, would be writable.
    """
    broad, found, notes = {*_BROAD, *homes}, [], []
    for run in config.worker.runs if "worker" in config.roles else ():
        root = _root(run.path, broad)
        if root == run.path.rstrip("/"):
            notes.append(
                f"{root}: if it is removed and made again, restart the service;"
                f" runs below a directory of their own, such as {root}s/*, need no restart"
            )
        if root in broad and root not in _EMPTIED:
            why = f"{run.path}: all of {root} would be writable for the service"
            hint = "let the jobs write below a directory of their own, such as /data/out/*"
            raise ConfigError(why, hint=hint)
        found.append(root)
    if local := local_directory(config.store.url):
        found.append(local.rstrip("/") or "/")
    needed: list[str] = []
    for path in sorted(set(found)):
        if not any(path.startswith(f"{above.rstrip('/')}/") for above in needed):
            needed.append(path)
    return needed, notes


def _root(path: str, broad: Iterable[str]) -> str:
    """Return the directory that stays while output directories come and go in it."""
    parts = path.rstrip("/").split("/")
    wild = next((n for n, part in enumerate(parts) if _MAGIC & set(part)), len(parts))
    root = "/".join(parts[: min(wild, len(parts) - 1)]) or "/"
    for top in _EMPTIED:
        if root == top or root.startswith(f"{top}/"):
            return top
    return path.rstrip("/") if wild == len(parts) and root in broad else root


def copied(template: str) -> str:
    """Return the unit as it is installed: without paths, which are in the drop-in."""
    lines = [f"# {MARK}: it will be replaced.  What you change belongs into `systemctl edit`.", "#"]
    for line in template.splitlines():
        key = line.partition("=")[0]
        is_of_drop_in = key in ("RequiresMountsFor", "ReadWritePaths")
        lines.append(f"# ({key}: see the drop-in.)" if is_of_drop_in else line)
    return "\n".join([*lines, ""])


def drop_in(config: Config, program: Program, needed: Iterable[str], user: str = "") -> str:
    """Return what depends on the configuration; ``user`` runs a head."""
    source, writable = program.source, " ".join(map(quoted, needed))
    again = "do it again when that file names other paths, roles or another store."
    lines = [
        f"# {MARK} from {source}: {again}",
        "# What you add belongs into a file of your own: `systemctl edit`.",
    ]
    if writable:
        lines += ["[Unit]", f"RequiresMountsFor={writable}", ""]
    lines += ["[Service]", "ExecStart=", f"ExecStart={_command(program)}"]
    lines += ["EnvironmentFile=", f"EnvironmentFile=-{_variables(source)}"]
    if user:
        lines += [f"User={user}", f"Group={user}"]
    if writable:
        lines.append(f"ReadWritePaths={writable}")
    if reason := _network(config):
        lines += [f"# {reason}", "PrivateNetwork=no", "RestrictAddressFamilies=AF_INET AF_INET6"]
    lines += _resources(config)
    # A head looks into nobody's home and has a /tmp of its own, unless its program (uv keeps
    # Pythons at home) lies there.
    read = [*program.caller, program.source, *program.seen, *config.head.config_from.values()]
    read = [] if "worker" in config.roles else read
    if any(path.startswith(("/home/", "/root/", "/run/user/")) for path in read):
        lines.append("ProtectHome=read-only")
    if any(path.startswith(("/tmp/", "/var/tmp/")) for path in read):  # noqa: S108
        lines.append("PrivateTmp=no")
    return "\n".join([*lines, ""])


def for_user(template: str, program: Program) -> str:
    """Return the unit for a user's own systemd, which cannot sandbox a service."""
    edit = "What you change belongs into `systemctl --user edit`."
    lines = [f"# {MARK}: it will be replaced.  {edit}"]
    section = ""
    for line in template.splitlines():
        key, _, value = line.partition("=")
        if line.startswith("["):
            section = line.strip("[]")
            lines += ["", line]
            if section == "Service":
                lines.append(f"ExecStart={_command(program)}")
                lines.append(f"EnvironmentFile=-{_variables(program.source)}")
        elif key in _OF_USERS.get(section, ()) and not value.startswith("TMPDIR="):
            lines.append(line.replace(" of %i", ""))
    return "\n".join([*lines, "WantedBy=default.target", ""])


def quoted(word: str) -> str:
    """Return one word of a unit's setting.  Raises ConfigError for what no unit can hold."""
    if any(ord(c) < 32 for c in word):
        why = f"{word!r}: a control character, which no unit can hold"
        raise ConfigError(why, hint="rename it")
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{word}"' if set(word) & set(" '\";\\") or not word else word


def _variables(source: str) -> str:
    """Return the file of variables beside a configuration.

    Systemd never unquotes this setting (config_parse_unit_env_file).
    """
    quoted(source)
    return f"{source.removesuffix('.yaml')}.env".replace("%", "%%")


def _command(program: Program) -> str:
    words = (*program.caller, "run", "-c", program.source)
    return " ".join(quoted(word).replace("$", "$$") for word in words)


def _network(config: Config) -> str:
    """Return why the service needs a network, or nothing."""
    if not local_directory(config.store.url):
        return "The store is reached over the network."
    if config.metrics.listen:
        return "Other machines read /metrics."
    is_head, alerts = {"head", "verifier"} & {*config.roles}, config.alerts
    return (
        "Alerts are sent over the network."
        if is_head and (alerts.webhook or alerts.command)
        else ""
    )


def _resources(config: Config) -> Sequence[str]:
    """Return settings for more memory and threads, where the configuration needs more."""
    has_head = "worker" in config.roles and len(config.roles) > 1
    more = max(0, config.limits.memory - _OWN_MEMORY) >> 20
    base = 3072 if has_head or "worker" not in config.roles else 768
    lines = []
    if has_head or more:
        lines += [f"MemoryHigh={base + more}M", f"MemoryMax={base * 4 // 3 + more}M"]
    if has_head:  # torch, in the child of the level `load`
        lines += [
            "# The head's and the verifier's work.",
            "MemoryDenyWriteExecute=no",
            "SystemCallFilter=@resources landlock_create_ruleset landlock_restrict_self",
            "OOMPolicy=continue",
        ]
    if has_head or config.limits.threads > _OWN_THREADS:
        lines.append(f"TasksMax={256 + 4 * config.limits.threads}")
    return lines
