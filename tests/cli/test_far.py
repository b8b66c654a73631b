"""``merge`` and ``diff`` on a real S3 server and a real SSH server, mixed with paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptsync.stores.opening import open_any
from tests.support.command_line import Cli
from tests.support.files_in_memory import contents
from tests.support.filled_stores import contents as contents_of_store
from tests.support.remote_stores import filled
from tests.support.seaweedfs import weed
from tests.support.sshd import sshd
from tests.support.vector import ROOT, vector


def test_from_anywhere_to_anywhere_bytes_are_the_same(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = vector("hf-fsdp2-2node").sources
    options = {"s3": weed().options(), "sftp": dict(sshd().options)}
    monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", json.dumps(options))
    bucket = f"s3://{weed().bucket()}"
    for name, directory in (("node0", one), ("base", ROOT / "base")):
        filled(open_any(f"{bucket}/{name}", options["s3"]), directory)
    words = ("--max-shard-size", "11000", "--dtype", "keep", "--config-from")
    cli("merge", one, two, tmp_path / "here", *words, ROOT / "base")
    wanted = contents(tmp_path / "here")
    s3, ssh = f"{bucket}/node0", sshd().url(two)
    for number, other in enumerate((two, ssh)):
        cli("merge", s3, other, f"{bucket}/{number}", *words, f"{bucket}/base")
        assert contents_of_store(open_any(f"{bucket}/{number}", options["s3"])) == wanted
    cli("merge", s3, ssh, sshd().url(tmp_path / "new" / "out"), *words, f"{bucket}/base")
    assert contents(tmp_path / "new" / "out") == wanted
    cli("diff", s3, ssh, f"{bucket}/0")
    cli("diff", f"{bucket}/0", f"{bucket}/base", code=1)
