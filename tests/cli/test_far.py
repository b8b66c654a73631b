"""``merge``, ``inspect``, ``verify`` and ``ls`` on a real S3 server and a real SSH server, mixed
with paths of this machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptsync.stores.opening import open_any
from tests.support.command_line import Cli
from tests.support.files_in_memory import contents
from tests.support.filled_stores import contents as content
from tests.support.remote_stores import filled
from tests.support.seaweedfs import weed
from tests.support.sshd import sshd
from tests.support.vector import ROOT, vector

TWO_NODES = vector("hf-fsdp2-2node")
SHARDED = ("--max-shard-size", "11000", "--dtype", "keep")


class Far:
    """A fresh bucket, and paths as a server shows them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {"s3": weed().options()}
        self.bucket = weed().bucket()
        self._monkeypatch = monkeypatch
        self._tell()

    def ssh(self, path: Path) -> str:
        """A path of this machine as sftp://."""
        self.options["sftp"] = dict(sshd().options)
        self._tell()
        return sshd().url(path)

    def filled(self, name: str, directory: Path) -> str:
        """A directory's files in the bucket."""
        filled(self.store(name), directory)
        return f"s3://{self.bucket}/{name}"

    def store(self, name: str) -> Any:
        return open_any(f"s3://{self.bucket}/{name}", self.options["s3"])

    def content(self, name: str) -> dict[str, bytes]:
        return content(self.store(name))

    def _tell(self) -> None:
        self._monkeypatch.setenv("CKPTSYNC_STORAGE_OPTIONS", json.dumps(self.options))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    return Far(monkeypatch)


def test_from_anywhere_to_anywhere_bytes_are_the_same(far: Far, tmp_path: Path, cli: Cli) -> None:
    one, two = TWO_NODES.sources
    cli("merge", one, two, tmp_path / "here", *SHARDED, "--config-from", ROOT / "base")
    wanted = contents(tmp_path / "here")
    with_base = (*SHARDED, "--config-from", far.filled("base", ROOT / "base"))
    s3, ssh = far.filled("node0", one), far.ssh(two)
    for number, sources in enumerate([(s3, two), (s3, ssh)]):
        cli("merge", *sources, f"s3://{far.bucket}/{number}", *with_base)
        assert far.content(str(number)) == wanted
    cli("merge", s3, ssh, far.ssh(tmp_path / "new" / "out"), *with_base)
    assert contents(tmp_path / "new" / "out") == wanted
    cli("diff", s3, ssh, f"s3://{far.bucket}/0")
    cli("diff", f"s3://{far.bucket}/0", f"s3://{far.bucket}/base", code=1)


def test_what_cannot_be_merged_is_told_as_here(far: Far, tmp_path: Path, cli: Cli) -> None:
    one = far.filled("node0", TWO_NODES.sources[0])
    here = cli("merge", TWO_NODES.sources[0], tmp_path / "out", *SHARDED, code=3).err
    assert cli("merge", one, f"s3://{far.bucket}/out", *SHARDED, code=3).err == here
    assert far.content("out") == {}
    assert "__2_0.distcp" in cli("inspect", one, code=3).out


def test_what_is_in_the_way_stays_and_what_is_not_there_is_said(far: Far, cli: Cli) -> None:
    sources = [far.filled(f"node{n}", source) for n, source in enumerate(TWO_NODES.sources)]
    out = f"s3://{far.bucket}/out"
    far.store("out").write("mine", [b"precious"])
    assert f"error: {out}: exists, with mine in it" in cli("merge", *sources, out, code=2).err
    assert far.content("out") == {"mine": b"precious"}
    assert "nothing found" in cli("merge", f"s3://{far.bucket}/nowhere", out + "2", code=2).err
    assert "inside the checkpoint" in cli("merge", *sources, f"{sources[0]}/out", code=2).err


def test_inspect_and_verify_say_of_a_url_what_they_say_of_a_path(far: Far, cli: Cli) -> None:
    def said(*arguments: object) -> dict[str, Any]:
        printed: dict[str, Any] = cli(*arguments, "--json").json
        return printed

    def verdict(location: object) -> list[object]:
        report = said("verify", location, "--level", "parse")["reports"][0]
        details = {finding["detail"] for finding in report["findings"]}
        return [report["verdict"], report["level"], details]

    vectors = [vector("raw-ds-zero3-tied"), vector("hf-ddp")]
    for number, (source,) in enumerate(of.sources for of in vectors):
        url = far.filled(f"x/{number}", source)
        assert said("inspect", source) | {"targets": [url]} == said("inspect", url)
        assert verdict(source) == verdict(url)
        assert verdict(url)[:2] == ["ok", "parse"]
