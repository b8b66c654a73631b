"""An OpenSSH server for tests: on loopback, without privileges, with keys of its own.

It ends when this process does.

server = sshd()  # one for the whole test process; skips the test where no sshd is installed
store = open_store(server.url(tmp_path), server.options)
"""

from __future__ import annotations

import atexit
import functools
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.campaigns.nodes import below
from tests.support.ports import free_port

NEEDED = "CKPTSYNC_TEST_SSHD"  # set to 1, a missing sshd fails the tests instead of skipping them
_LOCAL = Path(sys.prefix, "sshd")  # where tests/support/get_sshd.sh unpacks one
_TRIES = 5
# The shell outlives nobody: its standard input ends when whoever started it does, however that
# happens.
_UNTIL_EOF = 'sshd=$1; shift; "$sshd" "$@" & read -r _; kill $! 2>/dev/null; wait'


class Sshd:
    """A running server.  ``more``: further lines of its configuration."""

    def __init__(self, more: str = "") -> None:
        self.user = getpass.getuser()
        self.dir = Path(tempfile.mkdtemp(prefix="ckptsync-sshd-"))
        self.key, self.known_hosts, self.log = (
            self.dir / "user_key",
            self.dir / "known_hosts",
            self.dir / "log",
        )
        self._more = more
        self._host_key = self.dir / "host_key"
        for key in (self.key, self._host_key):
            _keygen(key)
        (self.dir / "authorized_keys").write_bytes(self.key.with_suffix(".pub").read_bytes())
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.start()

    @property
    def options(self) -> Mapping[str, object]:
        """Return the storage_options that let this user in, without what ~/.ssh says."""
        return self.options_with()

    def options_with(
        self, key: Path | None = None, known_hosts: Path | None = None
    ) -> Mapping[str, object]:
        """Return `options` with another key, or with other host keys."""
        lines = (
            f'IdentityFile "{key or self.key}"\nIdentitiesOnly yes\n'
            f'UserKnownHostsFile "{known_hosts or self.known_hosts}"\n'
            "GlobalKnownHostsFile /dev/null\n"
        )
        config = self.dir / f"ssh_config-{zlib.crc32(lines.encode()):08x}"
        fresh = config.with_suffix(f".{threading.get_ident()}")
        fresh.write_text(lines)
        fresh.replace(config)  # another thread's ssh never reads half of it
        return {"config": str(config)}

    def url(self, path: str | os.PathLike[str]) -> str:
        """Return the URL of an absolute path."""
        return f"sftp://{self.user}@127.0.0.1:{self.port}{os.fspath(path)}"

    def start(self) -> None:
        """Listen; after `stop` on the same port again.  Fails the test if that is not possible."""
        for _ in range(1 if self.port else _TRIES):
            self.port = self.port or free_port()
            process = self._started()
            if _answers(self.port, process):
                self._process = process
                public = self._host_key.with_suffix(".pub").read_text().split()[:2]
                self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {' '.join(public)}\n")
                return
            _ended(process)
            self.port = 0  # somebody else took it
        pytest.fail(f"no sshd came up: {self.log.read_text(errors='replace')}")

    def stop(self) -> None:
        """Accept no more connections; those that are open go on."""
        if self._process is not None:
            _ended(self._process)
            self._process = None

    def cut(self) -> None:
        """Accept no more connections, and break those that are open."""
        sessions = [*below(self._process.pid)][1:] if self._process else []
        self.stop()
        for session in sessions:
            with suppress(ProcessLookupError):
                os.kill(session, signal.SIGKILL)

    def close(self) -> None:
        """Stop the server, and delete its files."""
        self.stop()
        shutil.rmtree(self.dir, ignore_errors=True)

    def _started(self) -> subprocess.Popen[bytes]:
        program, environment = _program()
        lines = f"""\
Port {self.port}
ListenAddress 127.0.0.1
HostKey {self._host_key}
AuthorizedKeysFile {self.dir}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 200
""" + ("" if "Subsystem" in self._more else "Subsystem sftp internal-sftp\n")
        config = self.dir / "sshd_config"
        # the first word on a subject counts
        config.write_text(self._more + "\nPerSourcePenalties no\n" + lines)
        if subprocess.run(
            [program, "-t", "-f", config], env=environment, capture_output=True, check=False
        ).returncode:
            config.write_text(self._more + "\n" + lines)  # before OpenSSH 9.8
        with self.log.open("wb") as log:
            command = ["sh", "-c", _UNTIL_EOF, "sh", program, "-D", "-e", "-f", str(config)]
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )


@functools.cache
def sshd() -> Sshd:
    """Return the server of this test process; skip the test where none is installed."""
    wanted()
    server = Sshd()
    atexit.register(server.close)
    return server


@contextmanager
def another_sshd(more: str = "") -> Iterator[Sshd]:
    """Yield a server of a test's own, to stop it, or to change its configuration."""
    wanted()
    server = Sshd(more)
    try:
        yield server
    finally:
        server.close()


def wanted() -> None:
    """Skip the test where there is no OpenSSH; fail it if `NEEDED` says that there must be."""
    if all((_program()[0], shutil.which("ssh"), shutil.which("ssh-keygen"))):
        return
    reason = (
        "no OpenSSH here: install openssh-server and openssh-client, or run"
        " tests/support/get_sshd.sh"
    )
    if os.environ.get(NEEDED) == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@functools.cache
def _program() -> tuple[str, dict[str, str]]:
    """Return where sshd is, "" if nowhere, and its environment."""
    for path in ("/usr/sbin/sshd", shutil.which("sshd") or "", "/usr/local/sbin/sshd"):
        if path and os.access(path, os.X_OK):
            if os.getuid() == 0:
                # started by root it wants to give up its privileges there
                Path("/run/sshd").mkdir(exist_ok=True)
            return str(path), dict(os.environ)
    unpacked = _LOCAL / "usr/sbin/sshd"
    libraries = ":".join(
        map(str, [*_LOCAL.glob("usr/lib/*-linux-*"), *_LOCAL.glob("lib/*-linux-*")])
    )
    return (str(unpacked) if unpacked.exists() else ""), {
        **os.environ,
        "LD_LIBRARY_PATH": libraries,
    }


def _keygen(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ckptsync-test", "-f", path],
        check=True,
    )


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            return connection.recv(4) == b"SSH-"
        time.sleep(0.01)
    return False


def _ended(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)
