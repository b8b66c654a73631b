from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import StoreError
from ckptsync.stores.sftp.session import Session
from ckptsync.stores.sftp.ways import Ways
from ckptsync.stores.sftp.wire import Code, Kind, Refused, text
from tests.sftp_stores import files_of


def test_directories_are_made_once_and_again_when_they_went(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    ways = Ways(files)

    def step(session: Session) -> None:
        session.answer(Kind.MKDIR, text(files.path("a/b/new")) + bytes(4))

    ways.within("a/b", step)
    assert (tmp_path / "a/b/new").is_dir()
    for path in ("a/b/new", "a/b", "a"):
        (tmp_path / path).rmdir()
    ways.within("a/b", step)
    assert (tmp_path / "a/b/new").is_dir()
    with pytest.raises(Refused, match="status 4"):
        ways.within("a/b", step)  # it is there already: that is the caller's to judge


def test_where_something_is_deleted_again_and_again_the_patience_ends(tmp_path: Path) -> None:
    tries = []

    def step(session: Session) -> None:
        tries.append(session)
        raise Refused(Code.NO_SUCH_FILE)

    with pytest.raises(StoreError, match="deleted by somebody else 8 times"):
        Ways(files_of(tmp_path)).within("a", step)
    assert len(tries) == 8


def test_nothing_is_made_where_there_is_no_root(tmp_path: Path) -> None:
    for directory in ("", "a"):
        with pytest.raises(StoreError, match="no such directory, a store's directory wanted"):
            Ways(files_of(tmp_path / "nowhere")).within(directory, lambda _: None)
    assert list(tmp_path.iterdir()) == []
