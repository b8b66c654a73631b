"""Keys, tokens, signatures and passwords are in no output, log, process list or record, whatever
fails.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from urllib.parse import quote

import pytest

import ckptsync
from ckptsync.cli.main import main
from tests.campaigns.nodes import below
from tests.support.exhaustive import sampled
from tests.support.fault_proxy import HttpProxy
from tests.support.files_in_memory import contents as contents_of
from tests.support.network_faults import Answer, Fault, Request
from tests.support.refused_commands import run
from tests.support.seaweedfs import weed
from tests.support.sshd import sshd

DATA = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"
WRONG = "planted/Secret+0123456789abcdefghijklmno"
TOKEN = "planted/Token+/0123456789=="
SIGNS = (
    "Signature=",
    "X-Amz-Signature",
    "AWS4-HMAC-SHA256",
    "Authorization",
    "X-Amz-Security-Token",
    "PRIVATE KEY",
)
SECONDS = 300.0
QUICK = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "CKPTSYNC_LIMITS_PATIENCE": "300ms",
    "CKPTSYNC_LOG_LEVEL": "debug",
}


@dataclass
class Told:
    """Everything that a command showed to anybody: what it printed, and the command lines of it and
    its children.
    """

    code: int
    printed: str
    lines: set[str] = field(default_factory=set)

    def all(self) -> str:
        return "\n".join([self.printed, *self.lines])


def told(*arguments: str, until: str = "", **environment: str) -> Told:
    """Run it to its end, or to a word of its log."""
    command = [sys.executable, "-m", "ckptsync", *arguments]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CKPTSYNC_"))}
    environment = clean | QUICK | environment
    with subprocess.Popen(
        command, stdout=-1, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        lines, over = set[str](), threading.Event()
        watching = threading.Thread(target=lambda: lines.update(_command_lines(child.pid, over)))
        alarm = threading.Timer(SECONDS, child.kill)
        watching.start()
        alarm.start()
        assert child.stdout
        printed = ""
        for line in child.stdout:
            printed += line
            if until and until in line:
                child.send_signal(signal.SIGTERM)
        over.set()
        watching.join()
        alarm.cancel()
    return Told(child.returncode, printed, lines)


def _command_lines(pid: int, over: threading.Event) -> Iterator[str]:
    while not over.wait(0.02):
        for each in below(pid):
            with contextlib.suppress(OSError):  # it has ended
                yield (
                    Path(f"/proc/{each}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )


def reveals(text: str, *secrets: str) -> list[str]:
    """What of them is in a text, as it is or in the ways in which it travels."""
    spelt = [
        way
        for s in secrets
        for way in (
            s,
            quote(s, safe=""),
            s.partition("/")[2] or s,
            base64.b64encode(s.encode()).decode().rstrip("="),
            json.dumps(s),
        )
    ]
    return [s for s in (*spelt, *SIGNS) if s in text]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return copytree(DATA / "node0" / "checkpoint-4", tmp_path / "out" / "checkpoint-4")


def ways(
    tmp_path: Path, key: str, secret: str, token: str, endpoint: str
) -> Iterator[dict[str, str]]:
    shared = {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    options = {"key": key, "secret": secret, "endpoint_url": endpoint} | (
        {"token": token} if token else {}
    )
    yield {"CKPTSYNC_STORAGE_OPTIONS": json.dumps(options)}
    session = {"AWS_SESSION_TOKEN": token} if token else {}
    yield {**shared, **session, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    profile = tmp_path / "credentials"
    lines = [
        f"aws_access_key_id = {key}",
        f"aws_secret_access_key = {secret}",
        *([f"aws_session_token = {token}"] if token else []),
    ]
    profile.write_text("\n".join(["[planted]", *lines, ""]))
    yield {**shared, "AWS_SHARED_CREDENTIALS_FILE": str(profile), "AWS_PROFILE": "planted"}


@pytest.mark.parametrize(
    ("command", "way"),
    sampled([("push", 0), ("verify", 1), ("merge", 1), ("inspect", 0), ("ls", 2)], 2),
)
def test_of_credentials_that_are_refused_nothing_is_shown(
    tmp_path: Path, checkpoint: Path, command: str, way: int
) -> None:
    url = f"s3://{weed().bucket()}/store"
    environment = list(ways(tmp_path, "AKIAPLANTED", WRONG, TOKEN, weed().endpoint))[way]
    done = run(words(command, url, checkpoint), QUICK | environment)
    assert done.returncode in (2, 4), done.stderr
    assert "s3://" in done.stderr
    assert reveals(done.stdout + done.stderr, WRONG, TOKEN) == []


class Failing:
    """Answers errors from the time on when it is told to."""

    def __init__(self) -> None:
        self.answer: Fault | None = None

    def __call__(self, _request: Request) -> Fault | None:
        return self.answer


def test_of_credentials_that_are_good_nothing_is_shown_when_the_server_fails(
    tmp_path: Path, checkpoint: Path
) -> None:
    good, failing = weed().identity({"Action": "s3:*", "Resource": "*"}), Failing()
    url = f"s3://{weed().bucket()}/store"
    with closing(HttpProxy(("127.0.0.1", weed().port), failing)) as proxy:
        environment, *_ = ways(
            tmp_path, good["key"], good["secret"], "", f"http://127.0.0.1:{proxy.port}"
        )
        assert run(["push", str(checkpoint), "--store", url], QUICK | environment).returncode == 0
        commands = (("push", str(checkpoint), "--store", url), ("ls", "--store", url, "--json"))
        faults = (Answer(503, "SlowDown"), Answer(403, "ExpiredToken"), Answer(400, "Odd"))
        found = []
        for command, fault in sampled(itertools.product(commands, faults), 2):
            failing.answer = fault
            found.append(run(command, QUICK | environment))
    assert {done.returncode for done in found} <= {2, 4}
    assert reveals("".join(done.stdout + done.stderr for done in found), good["secret"]) == []


def test_a_daemon_at_debug_shows_nothing_and_leaves_nothing_in_the_store(
    tmp_path: Path, checkpoint: Path
) -> None:
    good = weed().identity({"Action": "s3:*", "Resource": "*"})
    bucket, failing = weed().bucket(), Failing()
    with closing(HttpProxy(("127.0.0.1", weed().port), failing)) as proxy:
        config = tmp_path / "worker.yaml"
        options = json.dumps({**good, "endpoint_url": f"http://127.0.0.1:{proxy.port}"})
        config.write_text(
            "node: n0\n"
            "roles: [worker, head, verifier]\n"
            f"store: {{url: 's3://{bucket}/store', options: {options}}}\n"
            f"worker: {{runs: [{checkpoint.parent}], scan_every: 200ms, quiet: 0s, unmarked: "
            "0s}\n"
            "log: {level: debug}\n"
        )
        well = told("run", "-c", str(config), until='"phase": "sent"')
        failing.answer = Answer(503, "SlowDown")
        ill = told("run", "-c", str(config), until='"phase": "waiting"')
    assert (well.code, '"phase": "sent"' in well.printed) == (0, True), well.printed
    assert (ill.code, "503" in ill.printed) == (0, True), ill.printed
    assert reveals(well.all() + ill.all(), good["secret"]) == []
    assert reveals("\n".join(contents(bucket)), good["secret"], good["key"]) == []
    spool = contents_of(checkpoint.parent / "_ckptsync").values()
    left = "".join(content.decode("latin-1") for content in spool)
    assert reveals(left, good["secret"], good["key"]) == []


def contents(bucket: str) -> Iterator[str]:
    """Names, metadata and bytes of everything in a bucket."""
    client = weed().client()
    for entry in client.list_objects_v2(Bucket=bucket)["Contents"]:
        found = client.get_object(Bucket=bucket, Key=entry["Key"])
        yield f"{entry['Key']} {found['Metadata']} {found['Body'].read().decode('latin-1')}"


def words(command: str, url: str, checkpoint: Path) -> list[str]:
    if command == "merge":
        return ["merge", url, str(checkpoint.with_name("model"))]
    of_save = [str(checkpoint)] if command == "push" else []
    return [command, *of_save, *(["--store"] if command in ("push", "ls") else []), url]


PASSWORDS = (
    f"s3://AKIA:{WRONG}@bucket/x",
    f"s3://AKIA:{WRONG}/more@bucket/x",
    "sftp://me:planted/Word@127.0.0.1/srv",
    "webdav://me:planted/Word@127.0.0.1/x",
)


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *(("ls", url) for url in PASSWORDS),
        *((command, PASSWORDS[0]) for command in ("push", "merge", "verify", "status", "inspect")),
    ],
)
def test_a_password_in_a_url_is_not_repeated(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], command: str, url: str
) -> None:
    assert main(words(command, url, checkpoint)) == 2
    assert reveals("".join(capsys.readouterr()), WRONG, "planted/Word") == []


def test_a_configuration_with_a_mistake_repeats_no_option(tmp_path: Path) -> None:
    config = tmp_path / "worker.yaml"
    config.write_text(
        f"store: {{url: 's3://bucket/x', options: {{secret: '{WRONG}', tokn: '{TOKEN}'}}}}\n"
        "worker: {runs: [/nowhere]}\n"
    )
    done = run(["run", "-c", config], {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"})
    assert done.returncode == 2
    assert "tokn" in done.stderr
    assert reveals(done.stdout + done.stderr, WRONG, TOKEN) == []


def test_ssh_is_started_with_nothing_that_is_secret(tmp_path: Path, checkpoint: Path) -> None:
    server = sshd()
    private = server.key.read_text().splitlines()[1]
    words = ("push", str(checkpoint), "--store", server.url(tmp_path / "store"))
    refused = told(
        *words,
        CKPTSYNC_STORAGE_OPTIONS=json.dumps({**server.options, "password": "planted/Word"}),
    )
    good = told(*words, CKPTSYNC_STORAGE_OPTIONS=json.dumps(dict(server.options)))
    assert (refused.code, good.code) == (2, 0), good.printed
    assert any("ssh" in line.split(" ")[0] for line in good.lines), "no child was seen"
    assert reveals(refused.all() + good.all(), "planted/Word", private) == []
