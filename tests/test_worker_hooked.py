"""What the marks of training processes say of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from ckptsync.worker.hooked import Hooked, read_hooked, word


def test_where_no_hook_ever_was_nothing_is_said(tmp_path: Path) -> None:
    assert read_hooked(tmp_path) == Hooked()
    assert word(Hooked(), None, "checkpoint-4", lambda _: True) == ""
