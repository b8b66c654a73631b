"""Connect to an SFTP server with the system's ``ssh``: command line, pipes, reasons of failure.

Keys, agents, jump hosts and certificates are configured for OpenSSH, so its client makes the
connection, and reads the user's ~/.ssh/config. A few options are always set, whatever that file
says (`ALWAYS`). Why a connection failed is in the messages that ssh prints, which become errors
with hints.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.stores.oserrors import PASSING
from ckptsync.stores.urls import Remote

OPTIONS = ("config",)
_AUTHORITY = re.compile(  # user, host and port
    r"(?:([A-Za-z0-9_.][A-Za-z0-9_.@+-]*\$?)@)?"
    r"([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::([0-9]{1,5}))?"
)
_EXAMPLE = "write sftp://user@host/srv/checkpoints or sftp://user@host:2222/srv/checkpoints"

# See ssh_config(5): check the host's key, forward nothing, never prompt, share no connection with
# other programs, notice a dead network within a minute.
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

# bytes: larger pipes mean fewer context switches; Linux grants this size to any user
_PIPE = 1 << 20
# bytes that one system call reads beyond the requested ones: many small answers at once
_AHEAD = 64 << 10
_VECTOR = 512  # buffers of one system call; Linux takes 1024
_MESSAGES = 8 << 10  # bytes of ssh's messages that are remembered
_SHOWN = 300  # characters of them in an error
_EXIT_S = 2.0  # seconds that ssh has to end, after it closed its pipe

# patterns of ssh's messages after which trying again does not help, and hints for the operator
_REFUSALS = {
    "host key verification failed": (
        "ssh-keyscan {port}{host} >> ~/.ssh/known_hosts (or what UserKnownHostsFile names), and"
        " compare the fingerprint (ssh-keygen -lf) with the one on {host} itself; if its key has"
        " changed, and you know why, first: ssh-keygen -R '{key}'"
    ),
    r"permission denied [(,]|permission denied, please|too many auth|no supported auth": (
        "put the public key into authorized_keys of {user} on {host}; the private key must be"
        " readable by its owner alone (chmod 600), and without a passphrase or in an agent;"
        " `ssh -v` tells more"
    ),
    r"bad (configuration|owner)|terminating, [0-9]+ bad|no matching [a-z ]+ found|missing argument"
    r"|no argument after|can't open user config|unsupported option": (
        "look at ~/.ssh/config, and at the server's sshd_config"
    ),
    r"subsystem request failed|sftp-server.*(not found|no such file)": (
        "the server's sshd_config needs: Subsystem sftp internal-sftp"
    ),
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is: an absolute ``path`` on ``host``.

    ``command``: the program that speaks SFTP with it on standard input and output.
    """

    url: str
    host: str
    user: str
    port: int | None
    path: str
    command: tuple[str, ...]


def parse_address(
    remote: Remote, options: Mapping[str, object], command: Sequence[str] = ()
) -> Address:
    """Return the address that an sftp:// URL and its storage_options mean.

    ``command`` replaces ssh, for tests. Raise ConfigError, without any password in its text.
    """
    authority, _, path = remote.rest.partition("/")
    server = _AUTHORITY.fullmatch(authority)
    if not server or (server[3] and not 0 < int(server[3]) < 1 << 16):
        # not shown: it may have a password in it
        raise ConfigError("sftp: no valid host, user or port in the URL", hint=_EXAMPLE)
    user, host, port = server[1] or "", server[2].strip("[]"), int(server[3] or 0)
    parts = [p for p in path.split("/") if p]
    if not parts or parts[0].startswith("~") or any(p in (".", "..") for p in parts):
        raise ConfigError(
            f"sftp://{host}/{path}: not an absolute path",
            hint="write the whole path of a directory on the server, without ~, . and ..",
        )
    words = [
        *_config_words(f"sftp://{host}", options),
        *(word for option in ALWAYS for word in ("-o", option)),
        *(["-l", user] if user else []),
        *(["-p", str(port)] if port else []),
    ]
    return Address(
        url=remote.url,
        host=host,
        user=user,
        port=port or None,
        path="/" + "/".join(parts),
        command=tuple(command) or ("ssh", *words, "-s", "--", host, "sftp"),
    )


def _config_words(title: str, options: Mapping[str, object]) -> list[str]:
    """Return ssh's arguments for the only storage_option, ``config``; [] without it.

    Raise ConfigError for other options, whose values are not shown (they may be passwords), and for
    a file that does not exist. ``title``: the store, for messages.
    """
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise ConfigError(
            f"{title}: unknown storage_options: {', '.join(unknown)}",
            hint="known: config; users, ports, keys and known hosts belong into ~/.ssh/config, or"
            " into the file that config names; passwords are not accepted and host keys are always"
            " checked",
        )
    config = options.get("config", "")
    if config == "none" or "config" not in options:
        return ["-F", "none"] if config else []
    if not isinstance(config, str | Path) or not (file := Path(config).expanduser()).is_file():
        raise ConfigError(
            f"{title}: config: the path of a file of ssh_config(5), or none, is needed"
        )
    return ["-F", str(file.absolute())]


class Connection:
    """The pipes to and from one ``ssh`` process, for one thread at a time.

    ``stall``: seconds without a byte after which a transfer fails. The constructor starts ssh, and
    raises ConfigError or Transient if it cannot be started. `send` and `receive` raise Transient
    after a stall, and what `connection_error` returns if ssh has ended.
    """

    def __init__(self, address: Address, stall: float) -> None:
        self.address, self.stall = address, stall
        self._is_broken = self._has_answered = False
        self._messages = b""
        self._ahead = memoryview(bytearray(_AHEAD))
        self._next = self._end = 0  # where its unread bytes begin and end
        self._process = _start_program(address.command)
        self._pipes = [
            p for p in (self._process.stdin, self._process.stdout, self._process.stderr) if p
        ]
        self._stdin, self._stdout, self._stderr = (p.fileno() for p in self._pipes)
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        for fd in (self._stdin, self._stdout):
            # not Linux, or the user's limit on pipes: slower, no more
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)

    @property
    def is_over(self) -> bool:
        """Whether no request can be sent any more."""
        return self._is_broken or self._process.poll() is not None

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send all bytes of all buffers; raise Transient after a stall, or ssh's error."""
        views = [memoryview(b) for b in buffers]
        while views:
            try:
                count = os.writev(self._stdin, views[:_VECTOR])
            except BlockingIOError:
                self._wait(self._stdin, select.POLLOUT, self.stall)
                continue
            except OSError as e:
                raise self._end_error() from e
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]

    def receive(self, out: memoryview, patience: float = 0.0) -> None:
        """Fill ``out``; wait ``patience`` seconds longer than usual for each byte.

        Raise Transient after a stall, or ssh's error.
        """
        filled = min(len(out), self._end - self._next)
        out[:filled] = self._ahead[self._next : self._next + filled]
        self._next += filled
        while filled < len(out):
            try:
                count = os.readv(self._stdout, [out[filled:], self._ahead])
            except BlockingIOError:
                self._wait(self._stdout, select.POLLIN, self.stall + patience)
                continue
            if not count:
                raise self._end_error()
            self._next, self._end = 0, max(0, count - (len(out) - filled))
            filled += count
        self._has_answered = True

    def receive_bytes(self, size: int, patience: float = 0.0) -> bytes:
        """Return the next ``size`` bytes, which should be few; see `receive`."""
        start, end = self._next, self._next + size
        if end <= self._end:
            self._next = end
            return bytes(self._ahead[start:end])
        out = bytearray(size)
        self.receive(memoryview(out), patience)
        return bytes(out)

    def close(self) -> None:
        """Kill ssh, and wait until it has ended."""
        self._is_broken = True
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _wait(self, fd: int, event: int, seconds: float) -> None:
        """Wait until ``fd`` is ready; mark the connection broken and raise Transient if too late.

        ``seconds``: how long, on a monotonic clock. Messages of ssh are read meanwhile: ssh stops
        while that pipe is full.
        """
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._stderr, select.POLLIN)
        while True:
            ready = [
                number for number, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            ]
            # messages alone do not prolong the wait
            if not ready or (fd not in ready and time.monotonic() > deadline):
                self._is_broken = True
                raise Transient(f"{self.address.url}: not a byte came for {seconds:.0f} s")
            if self._stderr in ready and not self._read_messages():
                poll.unregister(self._stderr)
            if fd in ready:
                return

    def _read_messages(self) -> bool:
        """Add what ssh has printed to its messages; return False if nothing is there. No wait."""
        try:
            data = os.read(self._stderr, 4096)
        except BlockingIOError:
            return False
        self._messages = (self._messages + data)[-_MESSAGES:]
        return bool(data)

    def _end_error(self) -> ConfigError | StoreError:
        """Mark the connection as broken; return the error that ssh's last messages tell.

        Waits up to `_EXIT_S` seconds for ssh to end.
        """
        self._is_broken = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)  # later messages may follow
        for _ in range(_MESSAGES):  # bounded: a server may talk for ever
            if not self._read_messages():
                break
        return connection_error(self.address, self._messages, has_answered=self._has_answered)


def connection_error(
    address: Address, messages: bytes, *, has_answered: bool
) -> ConfigError | StoreError:
    """Return why there is no connection, in ssh's own words.

    ConfigError if the operator has to change something, Transient if trying again may help,
    StoreError for an unknown host. ``messages`` is ssh's standard error; ``has_answered``: the
    server has served before, so the error is Transient.
    """
    text = messages.decode("utf-8", "replace")
    reason = last_lines(text) or "ssh gives no reason"
    if has_answered:  # keys and host were accepted before
        return Transient(f"{address.url}: the connection is gone: {reason}")
    error = f"{address.url}: no connection: {reason}"
    is_usual = address.port in (None, 22)
    words = {
        "host": address.host,
        "user": address.user or "this user",
        "port": f"-p {address.port} " if address.port else "",
        "key": address.host if is_usual else f"[{address.host}]:{address.port}",
    }
    for pattern, hint in _REFUSALS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return ConfigError(error, hint=hint.format_map(words))
    if re.search("not known|no address associated", text, re.IGNORECASE):
        return StoreError(error, hint="check the host's name and the name server")
    return Transient(error, hint="check that the machine is up and that sshd listens on this port")


def last_lines(text: str) -> str:
    """Return the last two lines of a text as one line, without control characters.

    At most its last `_SHOWN` characters. A server may have written the text, and a terminal obeys
    control characters.
    """
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    return "; ".join([line for line in lines if line][-2:])[-_SHOWN:]


def _start_program(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a program with pipes, and no terminal to prompt at.

    Raise ConfigError if there is no such program, Transient if the system is out of something.
    """
    try:
        return subprocess.Popen(  # noqa: S603 (`parse_address` makes every word of it)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"},
            start_new_session=True,  # no terminal to ask at; and Ctrl-C is ours to answer
        )
    except FileNotFoundError as e:
        raise ConfigError(
            f"no program {command[0]} here",
            hint="stores on sftp:// need OpenSSH's client: install openssh-client",
        ) from e
    except OSError as e:
        kind = Transient if e.errno in PASSING else ConfigError
        raise kind(f"{command[0]} could not be started: {(e.strerror or str(e)).lower()}") from e
