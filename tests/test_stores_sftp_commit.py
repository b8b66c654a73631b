from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckptsync.errors import Exists, StoreError, Transient
from ckptsync.stores.sftp.commit import claim, replace
from ckptsync.stores.sftp.files import ServerFiles
from tests.sftp_stores import files_of

Commit = Callable[[ServerFiles, str, str, int], None]


@pytest.mark.parametrize("commit", [claim, replace])
@pytest.mark.parametrize("faults", [(), ("plain",), ("replaces",), ("lose",)])
def test_a_name_that_is_free_is_given(tmp_path: Path, commit: Commit, faults: tuple[str, ...]) -> None:
    if faults == ("lose",):
        faults = (f"lose={18 if commit is claim else 200}={tmp_path / 'marker'}",)
    (tmp_path / "part").write_bytes(b"xyz")
    commit(files_of(tmp_path, *faults), "a", "part", 3)
    assert (tmp_path / "a").read_bytes() == b"xyz"
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("fault", ["plain", "replaces", "unsynced"])
def test_a_name_that_is_taken_is_never_claimed(tmp_path: Path, fault: str) -> None:
    (tmp_path / "part").write_bytes(b"xyz")
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(Exists, match="a: already there"):
        claim(files_of(tmp_path, fault), "a", "part", 3)
    assert (tmp_path / "a").read_bytes() == b"old"


def test_replacing_is_atomic_or_refused(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"xyz")
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(StoreError, match=r"a: cannot be replaced, since the server has no posix-rename@openssh\.com"):
        replace(files_of(tmp_path, "plain"), "a", "part", 3)
    assert (tmp_path / "a").read_bytes() == b"old"
    replace(files_of(tmp_path, f"lose=200={tmp_path / 'marker'}"), "a", "part", 3)
    assert (tmp_path / "a").read_bytes() == b"xyz"


@pytest.mark.parametrize("commit", [claim, replace])
def test_what_another_writer_has_taken_over_is_not_committed(tmp_path: Path, commit: Commit) -> None:
    with pytest.raises(Transient, match="taken over"):
        commit(files_of(tmp_path), "a", "part", 3)
    (tmp_path / "a").write_bytes(b"xyz")
    with pytest.raises((Transient, Exists)):
        commit(files_of(tmp_path), "a", "part", 3)
