"""A machine's name for itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptsync.records.names import checked_node
from ckptsync.worker.node import node_id, umask


def test_the_id_is_the_host_and_a_hash_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    (tmp_path / "other").write_text("4d1219c7c4c5404aaa1f6d2a48adfda4\n")
    one, other = node_id("gpu-7", tmp_path / "id"), node_id("gpu-7", tmp_path / "other")
    assert one.startswith("gpu-7-")
    assert len(one) == len("gpu-7-") + 8
    assert one == node_id("gpu-7", tmp_path / "id") != other


@pytest.mark.parametrize("told", [None, "", "\n", "uninitialized\n"])
def test_without_a_machine_id_it_is_still_the_same_at_every_start(tmp_path: Path, told: str | None) -> None:
    path = tmp_path / "id"
    if told is not None:
        path.write_text(told)
    assert node_id("h", path) == node_id("h", path)


@pytest.mark.parametrize("host", ["", "..", "a b/c", "ünï", "x" * 300, "-"])
def test_any_host_name_makes_a_valid_id(tmp_path: Path, host: str) -> None:
    assert checked_node(node_id(host, tmp_path / "none"))


def test_the_umask_is_as_the_process_has_it() -> None:
    before = os.umask(0o027)
    try:
        assert umask() == "0027"
    finally:
        os.umask(before)
