"""What fsspec's own configuration says of S3 and SFTP, which have stores of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptsync.stores.fsspec import configured_options
from ckptsync.stores.opening import open_any

CONFIGURATION = {
    "s3": {"endpoint_url": "http://minio:9000", "key": "theirs", "default_block_size": 5},
    "s3a": {"secret": "s"},
    "ssh": {"config": "/etc/ssh/other", "password": "hidden"},
}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mapping[str, Any]]]:
    """The options that each store was opened with."""
    received: list[Mapping[str, Any]] = []
    for store in ("s3.store.S3Store", "sftp.store.SftpStore"):
        monkeypatch.setattr(
            f"ckptsync.stores.{store}", lambda _url, options, _limits: received.append(options)
        )
    monkeypatch.setattr("fsspec.config.conf", CONFIGURATION)
    monkeypatch.setenv("FSSPEC_S3_KEY", "theirs")  # as if `CONFIGURATION` came from there
    configured_options.cache_clear()
    yield received
    configured_options.cache_clear()


def test_fsspecs_configuration_completes_the_options(
    options: list[Mapping[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    open_any("s3://bucket", {"key": "mine"})
    open_any("sftp://host/srv")
    assert options == [
        {"endpoint_url": "http://minio:9000", "key": "mine", "secret": "s"},
        {"config": "/etc/ssh/other"},
    ]
    unused = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(": ")[2] for text in unused] == ["default_block_size", "password"]
    assert "hidden" not in caplog.text


def test_a_file_that_fsspec_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf.json").write_text('{"s3": 1}')
    command = [sys.executable, "-m", "ckptsync", "ls", "--store", "s3://bucket"]
    ended = subprocess.run(
        command,
        check=False,
        env={"FSSPEC_CONFIG_DIR": str(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert f"{tmp_path}: the configuration of fsspec cannot be read" in ended.stderr


def test_without_fsspec_its_configuration_is_said_not_to_be_read(
    options: list[Mapping[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.config", None)
    open_any("sftp://host/srv", {"config": "mine"})
    assert options == [{"config": "mine"}]
    assert "fsspec's configuration is not read" in caplog.text
