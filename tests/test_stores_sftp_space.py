from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import StoreError, Transient
from ckptsync.stores.contract import About
from ckptsync.stores.sftp.space import why
from ckptsync.stores.sftp.wire import Code, Refused
from tests.sftp_stores import files_of, served


def test_a_full_disk_is_called_so_by_what_the_server_says_of_it(tmp_path: Path) -> None:
    for size in (3, 40 << 20):
        with pytest.raises(StoreError, match=f"head:{tmp_path}/run/a: no space left on device") as caught:
            served(tmp_path, "full").write("run/a", [bytes(size)], About(size))
        assert "make room" in caught.value.hint
        assert not isinstance(caught.value, Transient)
        assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("fault", ["plain", "reorder"])
def test_where_it_does_not_say_or_is_not_full_the_refusal_stands(tmp_path: Path, fault: str) -> None:
    error = why(files_of(tmp_path, fault), "a", Refused(Code.FAILURE), 100)
    assert str(error) == f"head:{tmp_path}/a: the server failed and gives no reason"
    assert "quota" in error.hint


def test_other_refusals_are_not_about_space(tmp_path: Path) -> None:
    assert "permission denied" in str(why(files_of(tmp_path, "full"), "a", Refused(Code.PERMISSION_DENIED), 100))
