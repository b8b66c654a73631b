"""What the public command says where S3 or SFTP refuses: one line that names the store and the
path, one that says what helps, no secret.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from ckptsync.stores.opening import create_store
from tests.cli.test_store_errors import FSDP
from tests.support.fault_proxy import HttpProxy
from tests.support.network_faults import DOWN, HEADLESS, STALL, Answer, Break, always
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


def given(scheme: str, options: Mapping[str, object]) -> dict[str, str]:
    return {"CKPTSYNC_STORAGE_OPTIONS": json.dumps({scheme: dict(options)}), **LIMITS}


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
        env = {**given(url.partition(":")[0], options), **environment}
        return refused(*words, code=code, names=[url, *names], secrets=secrets, env=env)

    return ask


@pytest.fixture(scope="module")
def bucket() -> str:
    """With a store of half a checkpoint at ``/store``."""
    bucket = weed().bucket()
    push_now(FSDP / "node0", create_store(f"s3://{bucket}/store", weed().options()), "n0", "demo")
    return bucket


@pytest.fixture
def url(bucket: str) -> str:
    return f"s3://{bucket}/store"


@pytest.mark.parametrize("command", ["merge", "push"])
def test_a_bucket_that_is_not_there(command: str, refused_at: Refused) -> None:
    absent, options = f"s3://absent-{secrets.token_hex(4)}/store", weed().options()
    said = refused_at(command, absent, options, 2, "NoSuchBucket", secrets=[options["secret"]])
    assert f"{HINT}make the bucket, or correct its name" in said


@pytest.mark.parametrize("command", ["verify", "merge"])
def test_an_identity_that_may_not_read(
    bucket: str, url: str, command: str, refused_at: Refused
) -> None:
    blind = weed().identity({"Action": ["s3:PutObject"], "Resource": [f"arn:aws:s3:::{bucket}/*"]})
    said = refused_at(command, url, blind, 4, "permission denied", secrets=[blind["secret"]])
    assert f"{HINT}the credentials need s3:" in said


def test_an_identity_that_may_not_write(bucket: str, refused_at: Refused) -> None:
    both = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    reader = weed().identity({"Action": ["s3:GetObject", "s3:ListBucket"], "Resource": both})
    said = refused_at("push", f"s3://{bucket}/another", reader, 4, "permission denied")
    assert f"{HINT}the credentials need s3:PutObject here" in said


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


@pytest.mark.parametrize(
    ("command", "fault"),
    [("ls", Break(DOWN, STALL, HEADLESS)), ("push", Answer(500, "InternalError"))],
)
def test_a_server_that_is_not_well_is_not_asked_for_ever(
    url: str, command: str, fault: Break | Answer, refused_at: Refused
) -> None:
    with closing(HttpProxy(("127.0.0.1", weed().port), always("", fault))) as proxy:
        options = weed().options(endpoint=f"http://127.0.0.1:{proxy.port}")
        said = refused_at(command, url, options, 4, CKPTSYNC_LIMITS_STALL="1s")
    assert "given up after" in said
    assert 1 <= proxy.requests.total() < 30


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


@pytest.fixture
def other_key(tmp_path: Path) -> Path:
    """A key that neither the server nor its users know."""
    made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")]
    subprocess.run(made, check=True)
    return tmp_path / "other"


def test_a_host_whose_key_has_changed(
    ssh_url: str, other_key: Path, tmp_path: Path, refused_at: Refused
) -> None:
    other = other_key.with_suffix(".pub").read_text().split()[:2]
    (tmp_path / "known").write_text(f"[127.0.0.1]:{sshd().port} {' '.join(other)}\n")
    options = sshd().options_with(known_hosts=tmp_path / "known")
    assert HINT in refused_at("ls", ssh_url, options, 2, "key")


def test_a_user_whom_the_server_refuses(ssh_url: str, other_key: Path, refused_at: Refused) -> None:
    assert HINT in refused_at("push", ssh_url, sshd().options_with(key=other_key), 2)


def test_an_ssh_server_that_is_down_or_is_none(ssh_url: str, refused_at: Refused) -> None:
    for command, port, why in (("push", unused_port(), "refused"), ("ls", weed().port, "")):
        url = ssh_url.replace(f":{sshd().port}/", f":{port}/")
        assert HINT in refused_at(command, url, sshd().options, 4, why)


def test_a_password_in_a_url_is_refused_and_not_repeated(ssh_url: str) -> None:
    url, env = ssh_url.replace("@", f":{SECRET}@"), given("sftp", sshd().options)
    refused("ls", "--store", url, code=2, names=["password"], secrets=[SECRET], env=env)
