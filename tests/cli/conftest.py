"""What tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Cli, command_line


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """``cli("ls", "fsdp2", code=10).out``: run a command, return what it printed."""
    return command_line(capsys)


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test makes its store, which $CKPTSYNC_STORE names."""
    monkeypatch.setenv("CKPTSYNC_STORE", str(tmp_path / "store"))
    return tmp_path / "store"
