"""SFTP stores for tests: over a real SSH server, and on servers that OpenSSH's is not."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import open_any
from ckptsync.stores.sftp.connection import Address, parse_address
from ckptsync.stores.sftp.server_files import ServerFiles, Sessions
from ckptsync.stores.sftp.store import SftpStore
from ckptsync.stores.urls import Remote
from tests.support.sshd import sshd

SERVER = Path(__file__).parent / "faulty_sftp_server.py"
# a busy machine may be slow to begin; nothing is lost on the way
SOON = Limits(patience=30.0, stall=30.0)
AT_ONCE = Limits(patience=0.0, stall=30.0)


def over_ssh(
    path: Path, limits: Limits = SOON, options: Mapping[str, object] | None = None
) -> SftpStore:
    """Return a store in a directory that the tests' own sshd serves."""
    server = sshd()
    return SftpStore(remote(server.url(path)), {**server.options, **(options or {})}, limits)


def served(path: Path, *faults: str, limits: Limits = SOON) -> SftpStore:
    """Return a store in a directory that tests/support/faulty_sftp_server.py serves."""
    return SftpStore(remote(f"sftp://head{path}"), {}, limits, program(*faults))


def through(port: int, home: Path, limits: Limits) -> Store:
    """Return a store in ``home/root``, which the tests' own sshd serves, behind a proxy's port."""
    server, root, known_hosts = sshd(), home / "root", home / "known_hosts"
    root.mkdir(exist_ok=True)
    known_hosts.write_text(server.known_hosts.read_text().replace(f":{server.port} ", f":{port} "))
    url = f"sftp://{server.user}@127.0.0.1:{port}{root}"
    return open_any(url, server.options_with(known_hosts=known_hosts), limits)


def program(*faults: str) -> Sequence[str]:
    return (sys.executable, "-S", "-E", str(SERVER), *faults)


def address_of(path: Path, *faults: str) -> Address:
    return replace(parse_address(remote(f"sftp://head{path}"), {}), command=tuple(program(*faults)))


def files_of(path: Path, *faults: str, limits: Limits = SOON) -> ServerFiles:
    return ServerFiles(Sessions(address_of(path, *faults), limits))


def remote(url: str) -> Remote:
    return Remote("sftp", url.partition("://")[2])
