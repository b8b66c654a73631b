"""One worker for an output directory and a node id."""

import shutil
from pathlib import Path

import pytest

from ckptsync.daemon.lock import Locks
from ckptsync.errors import ConfigError, StoreError


def test_a_second_worker_of_the_same_node_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "spool")
    first.hold(tmp_path / "spool")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "spool")
    first.close()
    second.hold(tmp_path / "spool")
    second.close()


def test_a_spool_that_was_removed_with_its_output_directory_is_made_and_locked_again(tmp_path: Path) -> None:
    first, second = Locks("n0"), Locks("n0")
    first.hold(tmp_path / "spool")
    shutil.rmtree(tmp_path / "spool")
    first.hold(tmp_path / "spool")
    with pytest.raises(ConfigError, match="another worker of node n0"):
        second.hold(tmp_path / "spool")
    first.close()


def test_nodes_that_share_an_output_directory_do_not_exclude_each_other(tmp_path: Path) -> None:
    locks = [Locks("n0"), Locks("n1")]
    for lock in locks:
        lock.hold(tmp_path / "spool")
    for lock in locks:
        lock.close()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "worker-n0.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        Locks("n0").hold(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_spool_that_cannot_be_made_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        Locks("n0").hold(tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
