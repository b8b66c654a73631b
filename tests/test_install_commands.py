"""The command that installs what is missing fits how ckptsync was installed."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from ckptsync.install_commands import install_extra, install_self

DIRECTORY = {"url": "file:///opt/ckptsync%20src", "dir_info": {}}
ARCHIVE = {"url": "https://h.example/ckptsync-1.whl", "archive_info": {}}
GIT = {"url": "https://h.example/c.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}}


def test_an_extra_is_named_by_its_packages_which_each_index_has() -> None:
    words = shlex.split(install_extra("s3"))
    assert words[1:4] == ["-m", "pip", "install"]
    assert any(word.startswith("botocore") for word in words)
    assert not any(word.startswith(("ckptsync", "ray", "numpy")) for word in words)
    assert any(word.startswith("numpy") for word in shlex.split(install_extra("")))


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (DIRECTORY, "/opt/ckptsync src"),
        (ARCHIVE, "https://h.example/ckptsync-1.whl"),
        (GIT, "git+https://h.example/c.git@0a1b"),
        (None, "ckptsync"),
    ],
)
def test_ckptsync_itself_comes_from_where_it_came_from(
    origin: object, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "METADATA").write_text("Name: ckptsync\nVersion: 1\n")
    if origin:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    made = importlib.metadata.PathDistribution(tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: made)
    assert isinstance(made, Distribution)
    assert shlex.split(install_self("/py")) == ["/py", "-m", "pip", "install", source]
