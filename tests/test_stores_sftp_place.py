from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError
from ckptsync.stores.sftp.place import ALWAYS, placed
from tests.sftp_stores import remote
from tests.sshd import wanted


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
def test_a_url_says_host_user_port_and_an_absolute_path(url: str, wanted: tuple[object, ...]) -> None:
    place = placed(remote(url), {})
    assert (place.host, place.user, place.port, place.path) == wanted
    assert place.url == url


def test_the_command_is_strict_whatever_else_is_configured(tmp_path: Path) -> None:
    key, hosts, config = tmp_path / "my 100% key", tmp_path / "known hosts", tmp_path / "config"
    for file in (key, hosts):
        file.write_bytes(b"")
    config.write_text(
        "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nForwardAgent yes\nControlMaster auto\nControlPath /tmp/x\nBatchMode no\n"
        "NoHostAuthenticationForLocalhost yes\nVerifyHostKeyDNS yes\nRemoteCommand date\nPermitLocalCommand yes\nLocalCommand date\n"
        "LocalForward 1234 localhost:80\n"
    )
    options = {"key_filename": str(key), "known_hosts": str(hosts), "config": str(config), "port": "2222", "username": "me"}
    place = placed(remote("sftp://head/srv"), options)
    wanted()
    told = subprocess.run([place.command[0], "-G", *place.command[1:]], check=True, capture_output=True, text=True).stdout
    said = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    assert said["stricthostkeychecking"] in ("true", "yes")
    assert said["batchmode"] == said["identitiesonly"] == said["clearallforwardings"] == "yes"
    assert said["forwardagent"] == said["permitlocalcommand"] == said["nohostauthenticationforlocalhost"] == "no"
    assert said["verifyhostkeydns"] in ("false", "no")
    assert said["userknownhostsfile"].replace("%%", "%").strip('"') == str(hosts)
    assert said["globalknownhostsfile"] == "/dev/null"
    assert said["controlmaster"] in ("false", "no")
    assert (said["user"], said["port"], said["hostname"]) == ("me", "2222", "head")
    assert not {"controlpath", "remotecommand", "localforward"} & set(said)
    assert int(said["serveraliveinterval"]) * int(said["serveralivecountmax"]) < 100


def test_without_options_ssh_finds_keys_and_known_hosts_itself() -> None:
    words = placed(remote("sftp://head/srv"), {}).command
    assert words == ("ssh", *(w for word in ALWAYS for w in ("-o", word)), "-s", "--", "head", "sftp")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "sftp://head",
            "sftp://head/",
            "sftp:///srv",
            "sftp://head/~/x",
            "sftp://head/~me/x",
            "sftp://head/a/../b",
            "sftp://@head/a",
        ),
        *("sftp://-oProxyCommand=date/srv", "sftp://-lroot@head/srv", "sftp://a b@head/srv", "sftp://$(date)@head/srv"),
        *(
            "sftp://he`ad/srv",
            "sftp://he;ad/srv",
            "sftp://head:0/srv",
            "sftp://head:x/srv",
            "sftp://head:99999/srv",
            "sftp://[::1/srv",
        ),
    ],
)
def test_what_could_be_an_option_or_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        placed(remote(url), {})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("sftp://me:sekrit@head/srv", {}),
        ("sftp://me:sek@rit@head/srv", {}),
        ("sftp://:sekrit@head/srv", {}),
        ("sftp://head:sekrit/srv", {}),
        ("sftp://head/srv", {"password": "sekrit"}),
        ("sftp://head/srv", {"passphrase": "sekrit"}),
        ("sftp://head/srv", {"token": "sekrit"}),
        ("sftp://head/srv", {"port": "sekrit"}),
    ],
)
def test_a_password_is_refused_and_not_repeated(url: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(remote(url), options)
    assert "sekrit" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "value", [None, "", "none", "accept-any", "auto_add", "/dev/null", False, 0, b"x", "/no/such/file", "a\nb"]
)
def test_host_keys_are_always_checked(value: object) -> None:
    with pytest.raises(ConfigError, match="known_hosts"):
        placed(remote("sftp://head/srv"), {"known_hosts": value})


def test_an_option_that_is_not_known_is_told_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="keyfile") as caught:
        placed(remote("sftp://head/srv"), {"keyfile": "/a"})
    assert "key_filename" in caught.value.hint
    with pytest.raises(ConfigError, match="host keys are always checked"):
        placed(remote("sftp://head/srv"), {"host_key_policy": "auto_add"})
    with pytest.raises(ConfigError, match="several users"):
        placed(remote("sftp://me@head/srv"), {"username": "you"})
    with pytest.raises(ConfigError, match="no such file"):
        placed(remote("sftp://head/srv"), {"key_filename": "/no/such/key"})
