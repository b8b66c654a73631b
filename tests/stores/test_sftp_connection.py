"""How a store over SSH is reached: URL, options, the ssh process, host keys and keys, and what is
tried again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.stores.sftp.connection import Connection, connection_error, parse_address
from tests.support.sftp_stores import address_of, over_ssh, remote
from tests.support.sshd import sshd, wanted

ADDRESS = parse_address(remote("sftp://me@head:2222/srv"), {})


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("sftp://head/srv/store", ("head", "", None, "/srv/store")),
        ("sftp://me@head:2222//srv//store", ("head", "me", 2222, "/srv/store")),
        ("sftp://me@[fe80::1%eth0]:22/srv", ("fe80::1%eth0", "me", 22, "/srv")),
        ("sftp://me@realm@head/s", ("head", "me@realm", None, "/s")),
        ("sftp://head/srv/a b%20c#?", ("head", "", None, "/srv/a b%20c#?")),
    ],
)
def test_a_url_says_host_user_port_and_an_absolute_path(
    url: str, wanted: tuple[object, ...]
) -> None:
    address = parse_address(remote(url), {})
    assert (address.host, address.user, address.port, address.path) == wanted
    assert address.url == url


def test_the_command_is_strict_whatever_else_is_configured(tmp_path: Path) -> None:
    config = tmp_path / "my 100% config"
    config.write_text(
        f"""StrictHostKeyChecking no
UserKnownHostsFile "{tmp_path}/known hosts"
User you
Port 7
ForwardAgent yes
ForwardX11 yes
Tunnel yes
ControlMaster auto
ControlPath /tmp/x
BatchMode no
NoHostAuthenticationForLocalhost yes
VerifyHostKeyDNS yes
RemoteCommand date
PermitLocalCommand yes
LocalForward 1234 localhost:80
"""
    )
    address = parse_address(remote("sftp://me@head:2222/srv"), {"config": str(config)})
    wanted()
    told = subprocess.run(
        [address.command[0], "-G", *address.command[1:]], check=True, capture_output=True, text=True
    ).stdout
    said = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    on = ["stricthostkeychecking", "batchmode", "clearallforwardings"]
    assert {said[option] for option in on} <= {"true", "yes"}
    off = "forwardagent forwardx11 tunnel permitlocalcommand nohostauthenticationforlocalhost"
    off += " verifyhostkeydns controlmaster updatehostkeys"
    assert {said[option] for option in off.split()} <= {"false", "no"}
    assert said["userknownhostsfile"].strip('"') == f"{tmp_path}/known hosts"
    assert (said["user"], said["port"], said["hostname"]) == ("me", "2222", "head")
    assert not {"controlpath", "remotecommand", "localforward"} & set(said)
    assert int(said["serveraliveinterval"]) * int(said["serveralivecountmax"]) < 100


OF_NO_STORE = ("", "/", "/~/x", "/~me/x", "/a/../b", ":0/srv", ":x/srv", ":99999/srv")
OPTIONS = ("-oProxyCommand=date", "-lroot@head", "a b@head", "$(date)@head", "he`ad", "he;ad")


@pytest.mark.parametrize(
    "url",
    [
        *(f"sftp://head{rest}" for rest in OF_NO_STORE),
        *(f"sftp://{host}/srv" for host in (*OPTIONS, "", "@head", "[::1")),
    ],
)
def test_what_could_be_an_option_or_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(remote(url), {})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sftp://me:sekrit@head/srv", {}),
        ("sftp://me:sek@rit@head/srv", {}),
        ("sftp://:sekrit@head/srv", {}),
        ("sftp://head:sekrit/srv", {}),
        ("sftp://head/srv", {"password": "sekrit"}),
        ("sftp://head/srv", {"config": "/sekrit"}),
    ],
)
def test_a_password_is_refused_and_not_repeated(url: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(remote(url), options)
    assert "sekrit" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("value", [None, False, b"x", 7, "/no/such/file", "a\nb", ""])
def test_the_configuration_of_ssh_is_a_file_or_none(value: object) -> None:
    with pytest.raises(ConfigError, match="config: the path of a file"):
        parse_address(remote("sftp://head/srv"), {"config": value})
    assert "none" in parse_address(remote("sftp://head/srv"), {"config": "none"}).command


def test_an_option_that_is_not_known_is_told_with_the_one_that_is() -> None:
    with pytest.raises(ConfigError, match="unknown storage_options: keyfile, port") as caught:
        parse_address(remote("sftp://head/srv"), {"port": 22, "keyfile": "a"})
    assert "known: config" in caught.value.hint


def running(tmp_path: Path, script: str, stall: float = 10.0) -> Connection:
    return Connection(
        replace(address_of(tmp_path), command=(sys.executable, "-S", "-E", "-c", script)), stall
    )


def test_bytes_go_through_in_both_directions_however_many(tmp_path: Path) -> None:
    connection = running(
        tmp_path, "import sys; d = sys.stdin.buffer.read(9_000_000); sys.stdout.buffer.write(d)"
    )
    sent, out = bytes(range(256)) * 35157, bytearray(9_000_000)
    connection.send(b"", memoryview(sent)[:4_000_000], sent[4_000_000:9_000_000], b"")
    connection.receive(memoryview(out))
    assert out == sent[:9_000_000]
    process = connection._process
    assert os.getsid(process.pid) == process.pid, "Ctrl-C is for us alone"
    connection.close()


def test_a_program_that_talks_is_listened_to_and_remembered_a_little(tmp_path: Path) -> None:
    connection = running(
        tmp_path,
        "import os, sys; [os.write(2, b'noise ' * 1000) for _ in range(200)]; os.write(2,"
        " b'Connection reset'); os.write(1, b'x')",
    )
    out = bytearray(1)
    connection.receive(memoryview(out))
    with pytest.raises(Transient, match=r"the connection is gone: .*Connection reset"):
        connection.receive(memoryview(out))
    assert connection.is_over
    assert len(connection._messages) <= 8 << 10
    connection.close()


@pytest.mark.parametrize("way", ["in", "out"])
def test_one_that_does_nothing_is_given_up(tmp_path: Path, way: str) -> None:
    connection = running(tmp_path, "import time; time.sleep(60)", 0.2)
    with pytest.raises(Transient, match="not a byte came"):
        (
            connection.send(bytes(4 << 20))
            if way == "out"
            else connection.receive(memoryview(bytearray(1)))
        )
    assert connection.is_over
    connection.close()


def test_a_host_key_that_changed_fails_closed_and_is_not_learnt(tmp_path: Path) -> None:
    """`tests/cli/test_far_errors.py` has an unknown one, and a key that lets nobody in."""
    hosts, other = tmp_path / "hosts", tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    line = f"[127.0.0.1]:{sshd().port} {other.with_suffix('.pub').read_text()}"
    hosts.write_text(line)
    with pytest.raises(ConfigError, match=r"Host key for .* has changed") as caught:
        over_ssh(tmp_path, options=sshd().options_with(known_hosts=hosts)).size("a")
    assert f"ssh-keygen -R '[127.0.0.1]:{sshd().port}'" in caught.value.hint
    assert hosts.read_text() == line


def test_without_ssh_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = over_ssh(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no program ssh here") as caught:
        store.size("a")
    assert "openssh-client" in caught.value.hint


CONNECT = "ssh: connect to host head port 22: "
RESOLVE = "ssh: Could not resolve hostname head: "


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (f"{CONNECT}Connection refused", Transient),
        ("kex_exchange_identification: Connection closed by remote host", Transient),  # MaxStartups
        (f"{RESOLVE}Temporary failure in name resolution", Transient),
        ("mux_client_request_session: session request failed: Session open refused", Transient),
        ("", Transient),
        (f"{RESOLVE}Name or service not known", StoreError),
        ("Too many authentication failures", ConfigError),
        ("Bad owner or permissions on /home/me/.ssh/config", ConfigError),
        ("Host key verification failed.", ConfigError),
        ("subsystem request failed on channel 0", ConfigError),
        ("Unable to negotiate with head port 22: no matching cipher found.", ConfigError),
        ("Permissions 0644 for 'key' are too open.\nPermission denied (publickey).", ConfigError),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(said: str, error: type[Exception]) -> None:
    assert type(connection_error(ADDRESS, said.encode(), has_answered=False)) is error


def test_what_a_machine_says_that_has_answered_is_never_about_keys_and_short() -> None:
    said = b"Host key verification failed.\r\n\x1b[31mConnection reset\n"
    found = connection_error(ADDRESS, said, has_answered=True)
    assert type(found) is Transient
    assert not {"\x1b", "\n"} & set(str(found))
    assert len(str(connection_error(ADDRESS, b"x" * 8000 + b"\xff", has_answered=False))) < 500
