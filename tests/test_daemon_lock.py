"""One worker for an output directory and a node id."""

import os
import shutil
from pathlib import Path

import pytest

from ckptsync.daemon.lock import Locks
from ckptsync.errors import ConfigError, StoreError
from ckptsync.walk import UnsafeSpool


def test_a_second_worker_of_the_same_node_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "_ckptsync")
    first.hold(tmp_path / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "_ckptsync")
    first.close()
    second.hold(tmp_path / "_ckptsync")
    second.close()


def test_a_spool_that_was_removed_with_its_output_directory_is_made_and_locked_again(tmp_path: Path) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "_ckptsync")
    shutil.rmtree(tmp_path / "_ckptsync")
    first.hold(tmp_path / "_ckptsync")
    assert not (tmp_path / "_ckptsync").exists(), "somebody may be about to remove what it is in, too"
    os.utime(tmp_path, (0, 0))
    first.hold(tmp_path / "_ckptsync")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "_ckptsync")
    first.close()


def test_nodes_that_share_an_output_directory_do_not_exclude_each_other(tmp_path: Path) -> None:
    locks = [Locks("n0"), Locks("n1")]
    for lock in locks:
        lock.hold(tmp_path / "_ckptsync")
    for lock in locks:
        lock.close()


def test_a_link_in_the_locks_location_is_not_followed(spool: Path) -> None:
    (spool / "worker-n0.lock").symlink_to(spool / "elsewhere")
    with pytest.raises(StoreError):
        Locks("n0").hold(spool)
    assert not (spool / "elsewhere").exists()


def test_a_spool_that_cannot_be_made_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").write_text("")
    with pytest.raises(UnsafeSpool, match="_ckptsync: no directory"):
        Locks("n0").hold(tmp_path / "_ckptsync")
    with pytest.raises(StoreError, match="gone"):
        Locks("n0").hold(tmp_path / "gone" / "_ckptsync")
    assert [p.name for p in tmp_path.iterdir()] == ["_ckptsync"]
