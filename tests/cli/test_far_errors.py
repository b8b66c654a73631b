"""What the public command says where S3 or SFTP refuses: one line that names the store and the
path, one that says what helps, no secret.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.cli.test_store_errors import FSDP
from tests.support.ports import unused_port
from tests.support.refused_commands import refused
from tests.support.seaweedfs import weed
from tests.support.sshd import sshd
from tests.support.worker_in_process import push_now

HINT = "ckptsync: hint: "
CHECKPOINT = "demo/checkpoint-4"
SECRET = "s3cr3t" + secrets.token_hex(16)
# what fails is tried again for a second; on a busy machine a server may need more to answer
LIMITS = {"CKPTSYNC_LIMITS_PATIENCE": "1s", "CKPTSYNC_LIMITS_STALL": "60s"}


Refused = Callable[..., str]


@pytest.fixture
def refused_at(tmp_path: Path) -> Refused:
    """Return a function that lets a command ask a store.

    It returns what the command says: one line with the URL and the names.
    """

    def ask(
        command: str,
        url: str,
        options: Mapping[str, object],
        code: int,
        *names: str,
        secrets: Sequence[str] = (),
        **environment: str,
    ) -> str:
        words = [command, *(["--store"] if command == "ls" else []), url]
        if command == "push":
            words = ["push", f"{FSDP}/node0", "--store", url, "--run", "demo", "--node", "n0"]
        elif command == "merge":
            words = ["merge", f"{url}/{CHECKPOINT}", f"{tmp_path}/out"]
        given = json.dumps({url.partition(":")[0]: dict(options)})
        env = {**LIMITS, "CKPTSYNC_STORAGE_OPTIONS": given, **environment}
        return refused(*words, code=code, names=[url, *names], secrets=secrets, env=env)

    return ask


@pytest.fixture(scope="module")
def url() -> str:
    """A store of half a checkpoint."""
    url = f"s3://{weed().bucket()}/store"
    push_now(FSDP / "node0", create_store(url, weed().options()), "n0", "demo")
    return url


@pytest.mark.parametrize("command", ["merge", "push"])
def test_a_bucket_that_is_not_there(command: str, refused_at: Refused) -> None:
    absent, options = f"s3://absent-{secrets.token_hex(4)}/store", weed().options()
    said = refused_at(command, absent, options, 2, "NoSuchBucket", secrets=[options["secret"]])
    assert f"{HINT}make the bucket, or correct its name" in said


@pytest.mark.parametrize(("command", "option"), [("ls", "key"), ("push", "secret")])
def test_wrong_credentials(url: str, command: str, option: str, refused_at: Refused) -> None:
    options = {**weed().options(), option: SECRET}
    said = refused_at(command, url, options, 2, secrets=[SECRET])
    assert f"{HINT}correct the {option}" in said


def test_no_credentials_at_all(url: str, tmp_path: Path, refused_at: Refused) -> None:
    options = {"endpoint_url": weed().endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    assert HINT in refused_at("ls", url, options, 2, **nowhere, HOME=str(tmp_path))


def test_a_server_that_is_down(url: str, refused_at: Refused) -> None:
    at = f"127.0.0.1:{unused_port()}"
    options = weed().options(endpoint=f"http://{at}")
    said = refused_at("push", url, options, 4, f"{at} refuses connections")
    assert f"{HINT}check that the server runs, and endpoint_url" in said


def test_a_server_that_speaks_no_tls(url: str, refused_at: Refused) -> None:
    options = weed().options(endpoint=weed().endpoint.replace("http:", "https:"))
    assert f"{HINT}correct endpoint_url" in refused_at("ls", url, options, 2, "TLS")


@pytest.fixture
def ssh_url(tmp_path: Path) -> str:
    """A store of half a checkpoint, as a server shows it."""
    push_now(FSDP / "node0", create_store(str(tmp_path / "store")), "n0", "demo")
    return sshd().url(tmp_path / "store")


@pytest.mark.parametrize("command", ["inspect", "push"])
def test_a_host_whose_key_is_not_known(
    ssh_url: str, tmp_path: Path, command: str, refused_at: Refused
) -> None:
    (tmp_path / "known").write_text("")
    options = sshd().options_with(known_hosts=tmp_path / "known")
    assert "ssh-keyscan" in refused_at(command, ssh_url, options, 2, "key")
    assert (tmp_path / "known").read_text() == "", "learnt without being told"


def test_an_ssh_server_that_is_down_or_is_none(ssh_url: str, refused_at: Refused) -> None:
    for command, port, why in (("push", unused_port(), "refused"), ("ls", weed().port, "")):
        url = ssh_url.replace(f":{sshd().port}/", f":{port}/")
        assert HINT in refused_at(command, url, sshd().options, 4, why)
