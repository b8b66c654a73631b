from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Transient
from ckptsync.stores.sftp.link import Link
from tests.sftp_stores import place_of


def running(tmp_path: Path, script: str, stall: float = 10.0) -> Link:
    return Link(replace(place_of(tmp_path), command=(sys.executable, "-S", "-E", "-c", script)), stall)


def test_bytes_go_through_in_both_directions_however_many(tmp_path: Path) -> None:
    link = running(tmp_path, "import sys; d = sys.stdin.buffer.read(9_000_000); sys.stdout.buffer.write(d)")
    sent, out = bytes(range(256)) * 35157, bytearray(9_000_000)
    link.send(b"", memoryview(sent)[:4_000_000], sent[4_000_000:9_000_000], b"")
    link.receive(memoryview(out))
    assert out == sent[:9_000_000]
    link.close()


def test_a_program_that_talks_is_listened_to_and_remembered_a_little(tmp_path: Path) -> None:
    link = running(
        tmp_path,
        "import os, sys; [os.write(2, b'noise ' * 1000) for _ in range(200)]; os.write(2, b'Connection reset'); os.write(1, b'x')",
    )
    out = bytearray(1)
    link.receive(memoryview(out))
    with pytest.raises(Transient, match=r"the connection is gone: .*Connection reset"):
        link.receive(memoryview(out))
    assert link.is_over
    assert len(link._heard) <= 8 << 10
    link.close()


@pytest.mark.parametrize("way", ["in", "out"])
def test_one_that_does_nothing_is_given_up(tmp_path: Path, way: str) -> None:
    link = running(tmp_path, "import time; time.sleep(60)", 0.2)
    with pytest.raises(Transient, match="not a byte came"):
        link.send(bytes(4 << 20)) if way == "out" else link.receive(memoryview(bytearray(1)))
    assert link.is_over
    link.close()


def test_its_end_is_told_and_it_leaves_no_process(tmp_path: Path) -> None:
    link = running(tmp_path, "import sys; sys.exit(255)")
    with pytest.raises(Transient, match="no connection"):
        link.receive(memoryview(bytearray(1)))
    link.close()
    link.close()
    assert link._process.returncode == 255


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no program /no/such"):
        Link(replace(place_of(tmp_path), command=("/no/such",)), 1.0)
