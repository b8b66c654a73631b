"""What an sftp:// URL and its storage_options mean, and the command of OpenSSH's that goes there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import ConfigError
from ckptsync.stores.urls import Remote

KNOWN = ("client_keys", "config", "key_filename", "known_hosts", "port", "user", "username")
_SECRETS = frozenset({"password", "passphrase", "client_passphrase", "passwd", "pwd"})
_POLICIES = frozenset({"host_key_policy", "missing_host_key_policy", "strict_host_key_checking", "auto_add"})
_UNCHECKED = frozenset({"", "none", "no", "false", "off", "accept-any", "accept-new", "auto_add", "auto-add", "any", "/dev/null"})
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+-]*\$?")
_EXAMPLE = "write sftp://user@host/srv/checkpoints or sftp://user@host:2222/srv/checkpoints"

# What is always so, whatever ~/.ssh/config says (ssh_config(5)): strict about the host's key, nothing forwarded, nobody asked, no shared
# connection whose end would be ours, and a dead network noticed within a minute.
ALWAYS = (
    "StrictHostKeyChecking=yes",
    "NoHostAuthenticationForLocalhost=no",
    "VerifyHostKeyDNS=no",
    "UpdateHostKeys=no",
    "BatchMode=yes",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "Tunnel=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "RequestTTY=no",
    "EscapeChar=none",
    "ControlMaster=no",
    "ControlPath=none",
    "ConnectTimeout=20",
    "ConnectionAttempts=1",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    "LogLevel=INFO",
)


@dataclass(frozen=True, slots=True)
class Place:
    """``path``: absolute, on the server.  ``command``: what connects there and speaks SFTP on its standard input and output."""

    url: str
    host: str
    user: str
    port: int | None
    path: str
    command: tuple[str, ...]
    known_hosts: str = "~/.ssh/known_hosts"


def placed(remote: Remote, options: Mapping[str, object], program: Sequence[str] = ()) -> Place:
    """Where a store is and how to get there, by ``ssh`` or another program; raises ConfigError, which repeats no secret."""
    authority, _, path = remote.rest.partition("/")
    before, at, address = authority.rpartition("@")
    name, colon, secret = before.partition(":")
    host, port = _address(address)
    where = f"sftp://{host}"
    _check_names(where, options)
    if colon or secret:
        raise ConfigError(f"{where}: a password in a URL", hint="it would stand in logs and process lists: use a key")
    if at and not name:
        raise ConfigError(f"{where}: no user before the @", hint=_EXAMPLE)
    user = _user(where, name, options)
    port = port or _port(where, options.get("port"))
    known_hosts = _known_hosts(where, options)
    return Place(
        url=remote.url,
        host=host,
        user=user,
        port=port,
        path=_path(where, path),
        command=tuple(program) or ("ssh", *_words(where, options, known_hosts), *_to(host, user, port)),
        known_hosts=known_hosts or "~/.ssh/known_hosts",
    )


def _check_names(where: str, options: Mapping[str, object]) -> None:
    if secrets := sorted(_SECRETS & set(options)):
        raise ConfigError(
            f"{where}: storage_options {secrets[0]}: passwords are not taken",
            hint="they would stand in configuration and memory: give the user a key (key_filename), or an agent",
        )
    if policies := sorted(_POLICIES & set(options)):
        raise ConfigError(
            f"{where}: storage_options {policies[0]}: host keys are always checked", hint="name a file with known_hosts"
        )
    if unknown := sorted(set(options) - set(KNOWN)):
        raise ConfigError(
            f"{where}: storage_options {', '.join(unknown)}: not known", hint=f"known: {', '.join(KNOWN)}; the rest: ~/.ssh/config"
        )


def _address(address: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(.*))?", address)
    if not found or not _HOST.fullmatch(found[1]):
        raise ConfigError("sftp: the URL's host is none that could be connected to", hint=_EXAMPLE)
    host = found[1].strip("[]")
    return host, None if found[2] is None else _port(f"sftp://{host}", found[2])


def _port(where: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,5}", str(value)) or not 0 < int(str(value)) < 1 << 16:
        raise ConfigError(f"{where}: port: a number from 1 to 65535 wanted")
    return int(str(value))


def _user(where: str, name: str, options: Mapping[str, object]) -> str:
    named = {str(v) for v in (name or None, options.get("user"), options.get("username")) if v is not None}
    if len(named) > 1:
        raise ConfigError(f"{where}: several users: {', '.join(sorted(named))}", hint="name one, in the URL or as username")
    user = "".join(named)
    if named and not _USER.fullmatch(user):
        raise ConfigError(f"{where}: user {user!r}: letters, digits and _ . @ + - wanted")
    return user


def _path(where: str, path: str) -> str:
    parts = [p for p in path.split("/") if p]
    if not parts:
        raise ConfigError(f"{where}: names no directory", hint=_EXAMPLE)
    if parts[0].startswith("~"):
        raise ConfigError(f"{where}/{path}: ~ is not known here", hint="write the whole path, as it is on the server")
    if any(p in (".", "..") for p in parts):
        raise ConfigError(f"{where}/{path}: a plain absolute path wanted")
    return "/" + "/".join(parts)


def _known_hosts(where: str, options: Mapping[str, object]) -> str:
    if "known_hosts" not in options:
        return ""
    value = options["known_hosts"]
    if value is None or str(value).lower() in _UNCHECKED or not isinstance(value, str | Path):
        raise ConfigError(
            f"{where}: known_hosts: a file's path wanted: host keys are always checked",
            hint="ssh-keyscan prints a host's keys; compare their fingerprints with the server's own",
        )
    return _file(where, "known_hosts", value)


def _words(where: str, options: Mapping[str, object], known_hosts: str) -> list[str]:
    words = ["-F", _config(where, options["config"])] if options.get("config") is not None else []
    for word in ALWAYS:
        words += ["-o", word]
    if known_hosts:
        quoted = known_hosts.replace("%", "%%")
        words += ["-o", f'UserKnownHostsFile="{quoted}"', "-o", "GlobalKnownHostsFile=/dev/null", "-o", "KnownHostsCommand=none"]
    keys = [key for option in ("key_filename", "client_keys") for key in _several(options.get(option))]
    for key in keys:
        words += ["-i", _file(where, "key_filename", key).replace("%", "%%")]
    return words + (["-o", "IdentitiesOnly=yes"] if keys else [])


def _to(host: str, user: str, port: int | None) -> list[str]:
    words = ["-l", user] if user else []
    if port:
        words += ["-p", str(port)]
    return [*words, "-s", "--", host, "sftp"]


def _several(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _config(where: str, value: object) -> str:
    return "none" if value == "none" else _file(where, "config", value)


def _file(where: str, option: str, value: object) -> str:
    """The absolute path of a file that is there, of which ssh's own words (quotes, tokens, variables) make nothing else."""
    if not isinstance(value, str | Path) or any(c in '"\\$' or ord(c) < 32 for c in str(value)):
        raise ConfigError(f"{where}: {option}: a file's path wanted")
    path = Path(value).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"{where}: {option}: {path}: no such file")
    return str(path)
