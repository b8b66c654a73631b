from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.stores.opening import bare
from ckptsync.stores.sftp.failures import refused, what_ssh_said
from ckptsync.stores.sftp.place import placed
from ckptsync.stores.sftp.wire import Code, Refused
from tests.sftp_stores import AT_ONCE, over_ssh, remote
from tests.sshd import another_sshd, sshd

PLACE = placed(remote("sftp://me@head:2222/srv"), {})


def test_an_unknown_host_key_fails_closed_and_says_how_to_learn_it(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{sshd().port}.*: the host's key is not in {hosts}") as caught:
        over_ssh(tmp_path, options={"known_hosts": str(hosts)}).size("a")
    assert f"ssh-keyscan -p {sshd().port} 127.0.0.1 >> {hosts}" in caught.value.hint
    assert caught.value.exit_code == 2
    assert hosts.read_bytes() == b""


def test_a_host_key_that_changed_fails_closed_and_is_not_learnt(tmp_path: Path) -> None:
    hosts, other = tmp_path / "hosts", tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    line = f"[127.0.0.1]:{sshd().port} {other.with_suffix('.pub').read_text()}"
    hosts.write_text(line)
    with pytest.raises(ConfigError, match="host's key is not the one in") as caught:
        over_ssh(tmp_path, options={"known_hosts": str(hosts)}).size("a")
    assert f"ssh-keygen -R '[127.0.0.1]:{sshd().port}'" in caught.value.hint
    assert hosts.read_text() == line


def test_a_key_that_lets_nobody_in_is_a_configuration_error(tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    with pytest.raises(ConfigError, match=r"does not let .* in: .*Permission denied \(publickey\)") as caught:
        over_ssh(tmp_path, options={"key_filename": str(other)}).size("a")
    assert "authorized_keys" in caught.value.hint


def test_a_key_that_was_let_in_before_is_tried_again(tmp_path: Path) -> None:
    with another_sshd() as server:
        allowed = server.dir / "authorized_keys"
        key = allowed.read_text()
        store = bare(server.url(tmp_path), server.options, replace(AT_ONCE, patience=2.0))
        store.write("a", [b"x"])
        allowed.write_text("")
        again = bare(server.url(tmp_path), server.options, AT_ONCE)
        with pytest.raises(ConfigError, match="does not let"):
            again.size("a")
        for child in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text() == "ssh\n":
                os.kill(int(child), signal.SIGKILL)
        with pytest.raises(Transient, match="does not let"):
            store.size("a")
        allowed.write_text(key)
        assert store.size("a") == again.size("a") == 1


def test_without_ssh_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = over_ssh(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no program ssh here") as caught:
        store.size("a")
    assert "openssh-client" in caught.value.hint


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ("Subsystem none /bin/false", ConfigError, "no SFTP is offered"),
        ("ForceCommand echo Welcome to this machine", StoreError, "the answer is no SFTP"),
        ("Ciphers aes128-ctr", ConfigError, "no matching cipher found"),
    ],
)
def test_a_server_that_is_set_up_otherwise_is_told_once(tmp_path: Path, more: str, error: type[Exception], text: str) -> None:
    config = tmp_path / "config"
    config.write_text("Ciphers aes256-ctr\n")
    with another_sshd(more) as server, pytest.raises(error, match=text) as caught:
        bare(server.url(tmp_path), {**server.options, "config": str(config)}, AT_ONCE).size("a")
    assert not isinstance(caught.value, Transient)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("ssh: connect to host head port 22: Connection refused", Transient),
        ("ssh: connect to host head port 22: Connection timed out", Transient),
        ("ssh: connect to host head port 22: No route to host", Transient),
        ("kex_exchange_identification: Connection closed by remote host", Transient),  # MaxStartups
        ("ssh: Could not resolve hostname head: Temporary failure in name resolution", Transient),
        ("mux_client_request_session: session request failed: Session open refused by peer", Transient),
        ("", Transient),
        ("ssh: Could not resolve hostname head: Name or service not known", StoreError),
        ("Too many authentication failures", ConfigError),
        ("Bad owner or permissions on /home/me/.ssh/config", ConfigError),
        ("Host key verification failed.", ConfigError),
        ("Permissions 0644 for '/home/me/key' are too open.\nPermission denied (publickey).", ConfigError),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(said: str, error: type[Exception]) -> None:
    assert type(what_ssh_said(PLACE, said.encode(), 255, has_answered=False)) is error


def test_what_a_serving_machine_says_is_never_about_keys() -> None:
    found = what_ssh_said(PLACE, b"Host key verification failed.\r\n\x1b[31mConnection reset\n", 255, has_answered=True)
    assert type(found) is Transient
    assert "\x1b" not in str(found)
    assert "\n" not in str(found)


def test_a_stranger_may_not_say_much() -> None:
    assert len(str(what_ssh_said(PLACE, b"x" * 8000 + b"\xff", None, has_answered=False))) < 500


def test_refusals_name_host_path_and_reason() -> None:
    error = refused(PLACE, "/srv/a", Refused(Code.PERMISSION_DENIED, "Permission denied"))
    assert str(error) == "head:/srv/a: permission denied"
    assert error.hint.startswith("me needs to read, write and search")
    assert type(refused(PLACE, "/srv/a", Refused(Code.CONNECTION_LOST))) is Transient
    assert str(refused(PLACE, "/a", Refused(14, "No space left"))) == "head:/a: refused (No space left)"
