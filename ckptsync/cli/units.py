"""From a configuration to the text of systemd's units: what does not depend on it is in ``systemd/``, the rest in a drop-in.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError

_MAGIC = frozenset("*?[")
_EMPTIED = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 - at a boot, or before: what lies below may not be there when a service starts
_BROAD = ("/", "/home", "/root", "/var", "/opt", "/usr", "/etc")
_OWN_MEMORY = 256 << 20  # of limits.memory: what the unit's own MemoryHigh leaves room for
_OWN_THREADS = 24  # of limits.threads, by TasksMax
_OWN_STALL = 60  # seconds of limits.stall, by WatchdogSec, which is 50 more

MARK = "Written by `ckptsync service install`"
_KEPT = {
    "Unit": ("Description",),
    "Service": (
        *(
            "Type",
            "NotifyAccess",
            "ExecReload",
            "UMask",
            "Restart",
            "RestartSec",
            "RestartPreventExitStatus",
            "WatchdogSec",
            "LimitCORE",
        ),
        *(
            "TimeoutStopSec",
            "TimeoutAbortSec",
            "KillMode",
            "Nice",
            "CPUWeight",
            "IOWeight",
            "IOSchedulingClass",
            "IOSchedulingPriority",
        ),
        *("MemoryHigh", "MemoryMax", "OOMScoreAdjust", "TasksMax", "Environment", "NoNewPrivileges", "LockPersonality"),
        *("MemoryDenyWriteExecute", "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures"),
    ),
    "Install": (),
}
"""What a user's own systemd can do: no mounts, no capabilities, no other user."""


@dataclass(frozen=True, slots=True)
class Paths:
    """What a service writes to.  ``needed``: directories that must be there when it starts; ``notes``: what the operator is to know."""

    needed: tuple[str, ...]
    notes: tuple[str, ...] = ()


def local(url: str) -> str:
    """The directory of a store that is one, or nothing."""
    scheme, separator, rest = url.partition("://")
    return rest if separator and scheme == "file" else "" if separator else url


def paths(config: Config, homes: Iterable[str] = ()) -> Paths:
    """Output directories' own mounts and the store, none of them within another; ``homes`` are never opened as a whole."""
    broad, found, notes = {*_BROAD, *homes}, [], []
    for run in config.worker.runs if "worker" in config.roles else ():
        root = _above(run.path, broad)
        if root == run.path.rstrip("/"):
            notes.append(
                f"{root}: if it is removed and made again, restart the service; runs below a directory of their own, such as {root}s/*, need no restart"
            )
        if root in broad and root not in _EMPTIED:
            raise ConfigError(
                f"{run.path}: all of {root} would be writable for the service",
                hint="let the jobs write below a directory of their own, such as /data/out/*",
            )
        found.append(root)
    if local(config.store.url):
        found.append(local(config.store.url).rstrip("/") or "/")
    return Paths(tuple(_outermost(found)), tuple(notes))


def _above(path: str, broad: Iterable[str]) -> str:
    """Where output directories of a (glob of a) path appear: a directory that stays while they come and go."""
    parts = path.rstrip("/").split("/")
    wild = next((n for n, part in enumerate(parts) if _MAGIC & set(part)), len(parts))
    root = "/".join(parts[: min(wild, len(parts) - 1)]) or "/"
    for top in _EMPTIED:
        if root == top or root.startswith(f"{top}/"):
            return top
    return path.rstrip("/") if wild == len(parts) and root in broad else root


def _outermost(found: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(found)):
        if not any(path.startswith(f"{k.rstrip('/')}/") for k in kept):
            kept.append(path)
    return kept


def copied(template: str) -> str:
    """The unit as it is installed: the example's paths are left out, since the drop-in has the configuration's."""
    lines = [f"# {MARK}: it will be replaced.  What you change belongs into `systemctl edit`.", "#"]
    for line in template.splitlines():
        key = line.partition("=")[0]
        lines.append(f"# ({key}: see the drop-in.)" if key in ("RequiresMountsFor", "ReadWritePaths") else line)
    return "\n".join([*lines, ""])


@dataclass(frozen=True, slots=True)
class Program:
    """How the service is started: a ``command``, the configuration's path in it (``source``), and what else must be ``seen`` for that."""

    command: tuple[str, ...]
    source: str
    seen: tuple[str, ...] = ()


def drop_in(config: Config, program: Program, found: Paths, user: str = "") -> str:
    """What depends on the configuration; ``user`` runs a head."""
    source = program.source
    lines = [f"# {MARK} from {source}: do it again when that file names other paths, roles or another store."]
    lines.append("# What you add belongs into a file of your own: `systemctl edit`.")
    writable = " ".join(map(quoted, found.needed))
    if writable:
        lines += ["[Unit]", f"RequiresMountsFor={writable}", ""]
    lines += [
        "[Service]",
        "ExecStart=",
        f"ExecStart={_command(program.command)}",
        "EnvironmentFile=",
        f"EnvironmentFile=-{variables(source)}",
    ]
    lines += [f"User={user}", f"Group={user}"] if user else []
    lines += [f"ReadWritePaths={writable}"] if writable else []
    if reason := _network(config):
        lines += [f"# {reason}", "PrivateNetwork=no", "RestrictAddressFamilies=AF_INET AF_INET6"]
    return "\n".join([*lines, *_room(config), *_reading(config, program), ""])


def for_user(template: str, program: Program) -> str:
    """The worker's unit for a user's own systemd, which cannot shut a service in."""
    lines = [f"# {MARK}: it will be replaced.  What you change belongs into `systemctl --user edit`."]
    section = ""
    for line in template.splitlines():
        key, _, value = line.partition("=")
        if line.startswith("["):
            section = line.strip("[]")
            lines += ["", line]
            lines += (
                [f"ExecStart={_command(program.command)}", f"EnvironmentFile=-{variables(program.source)}"]
                if section == "Service"
                else []
            )
        elif key in _KEPT.get(section, ()) and not value.startswith("TMPDIR="):
            lines.append(line.replace(" of %i", ""))
    return "\n".join([*lines, "WantedBy=default.target", ""])


def variables(source: str) -> str:
    """The file of variables beside a configuration, as a unit names it: of all its words this one is never unquoted (config_parse_unit_env_file)."""
    quoted(source)
    return f"{source.removesuffix('.yaml')}.env".replace("%", "%%")


def quoted(word: str) -> str:
    """One word of a unit's setting; raises ConfigError for what no unit can hold."""
    if any(ord(c) < 32 for c in word):
        raise ConfigError(f"{word!r}: a control character, which no unit can hold", hint="rename it")
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{word}"' if set(word) & set(" '\";\\") or not word else word


def _command(words: Sequence[str]) -> str:
    return " ".join(quoted(word).replace("$", "$$") for word in words)


def _network(config: Config) -> str:
    """Why there must be one, or nothing."""
    if not local(config.store.url):
        return "The store is behind a network."
    if config.metrics.listen:
        return "Others ask for /metrics."
    is_telling = {"head", "verifier"} & {*config.roles} and (config.alerts.webhook or config.alerts.command)
    return "Alerts leave this machine." if is_telling else ""


def _room(config: Config) -> list[str]:
    """More than a sending worker's memory, threads and patience, where the configuration wants more."""
    has_head, more = "worker" in config.roles and len(config.roles) > 1, max(0, config.limits.memory - _OWN_MEMORY)
    base = 3072 if has_head or "worker" not in config.roles else 768
    lines = [f"MemoryHigh={base + (more >> 20)}M", f"MemoryMax={base * 4 // 3 + (more >> 20)}M"] if has_head or more else []
    if has_head:  # torch, in the child of the level `load`
        lines += [
            "# The head's and the verifier's work.",
            "MemoryDenyWriteExecute=no",
            "SystemCallFilter=@resources landlock_create_ruleset landlock_restrict_self",
            "OOMPolicy=continue",
        ]
    if has_head or config.limits.threads > _OWN_THREADS:
        lines.append(f"TasksMax={256 + 4 * config.limits.threads}")
    if config.limits.stall > _OWN_STALL:
        lines.append(f"WatchdogSec={round(config.limits.stall) + 50}")
    return lines


def _reading(config: Config, program: Program) -> list[str]:
    """A head looks into nobody's home and has a /tmp of its own, unless the program (uv keeps its Pythons at home), or what it reads, is there."""
    wanted = [] if "worker" in config.roles else [*program.command, *program.seen, *config.head.config_from.values()]
    lines = ["ProtectHome=read-only"] if any(path.startswith(("/home/", "/root/", "/run/user/")) for path in wanted) else []
    return [*lines, "PrivateTmp=no"] if any(path.startswith(("/tmp/", "/var/tmp/")) for path in wanted) else lines  # noqa: S108
