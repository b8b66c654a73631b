"""Files that a user names on the command line: what is none is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptsync.safe_open import read_named
from tests.support.refused_commands import refused

WAYS = {
    "status -c": ["status", "-c", "{odd}"],
    "run -c": ["run", "-c", "{odd}"],
    "service -c": ["service", "install", "-c", "{odd}", "--dry-run"],
    "training": ["doctor", "--training", "{odd}", "--store", "{home}/store"],
    "baseline": ["verify", "{home}/ck", "--baseline", "{odd}"],
    "config-from": ["merge", "{home}/ck", "{home}/out", "--config-from", "{odd}"],
    "base": ["merge", "{home}/ck", "{home}/out", "--base", "{odd}"],
}


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
@pytest.mark.parametrize("way", WAYS)
def test_a_pipe_or_device_or_directory_is_refused(way: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    odd = Path("/dev/zero") if kind == "device" else tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "directory":
        odd.mkdir()
        if way in ("config-from", "base"):
            pytest.skip("a directory is expected")
    words = [word.format(odd=odd, home=tmp_path) for word in WAYS[way]]
    refused(*words, code=2, names=[odd])


def test_what_a_shell_has_opened_is_read(tmp_path: Path) -> None:
    out, into = os.pipe()
    os.write(into, b"x: 1")
    os.close(into)
    assert read_named(f"/dev/fd/{out}", 100) == b"x: 1"
    os.close(out)
    (tmp_path / "long").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("long")
    assert read_named(tmp_path / "link", 5) == b"x" * 6


def test_thousands_of_unknown_keys_are_told_soon_and_shortly(tmp_path: Path) -> None:
    keys = "".join(f"roless{i}: 1\n" for i in range(5_000))
    (tmp_path / "c.yaml").write_text(f"store: {{url: /s}}\n{keys}")
    said = refused("status", "-c", tmp_path / "c.yaml", code=2, names=["problems"])
    assert "c.yaml:2: roless0: unknown key (did you mean roles?)" in said
    assert "more" in said
    assert len(said) < 10_000
