"""A configuration is tried before a process that works is ended for it."""

from pathlib import Path

import pytest

from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.daemon.rehearsing import rehearsed
from ckptsync.errors import CkptsyncError


def config(store: Path | str, runs: str = "/data/out", more: str = "") -> Config:
    return read(f"store: {{url: '{store}'{more}}}\nworker: {{runs: ['{runs}']}}\n", "c.yaml", {})


def test_what_may_come_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    for one in (config(tmp_path), config(tmp_path / "not-mounted"), config("s3://bucket/x"), config("sftp://host/x")):
        assert rehearsed(one) is one


def test_what_can_never_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for one in (config(tmp_path / "file"), config("nonsense://x"), config(tmp_path, more=", options: {a: b}")):
        with pytest.raises(CkptsyncError):
            rehearsed(one)


def test_output_directories_of_which_none_may_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CkptsyncError, match="inside the store"):
        rehearsed(config(tmp_path, str(tmp_path / "out")))
