from __future__ import annotations

import errno
import os

import pytest

from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.stores.oserrors import HINTS, PASSING, StoreErrors

LOCAL, REMOTE = StoreErrors("/store"), StoreErrors("/store", is_remote=True)
REFUSED = [
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    errno.ENOTDIR,
    errno.ELOOP,
]


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", HINTS)
def test_what_the_operator_can_do_something_about_names_the_path_the_store_and_the_remedy(
    code: int,
) -> None:
    told = LOCAL.error("run/a", os_error(code))
    assert str(told) == f"run/a: {os.strerror(code).lower()}, in the store /store"
    assert told.hint == HINTS[code]


def test_anything_else_is_told_as_it_is() -> None:
    assert (
        str(LOCAL.error("run/a", os_error(errno.EXDEV)))
        == "run/a: invalid cross-device link, in the store /store"
    )
    assert str(LOCAL.error("run/a", OSError("Odd"))) == "run/a: odd, in the store /store"


@pytest.mark.parametrize("telling", [LOCAL, REMOTE])
def test_what_passes_is_told_from_what_does_not(telling: StoreErrors) -> None:
    for code in PASSING:
        assert type(telling.error("a", os_error(code))) is Transient
    for code in REFUSED:
        assert type(telling.error("a", os_error(code))) is StoreError


def test_an_io_error_is_a_broken_disk_here_and_a_silent_server_elsewhere() -> None:
    assert type(LOCAL.error("a", os_error(errno.EIO))) is StoreError
    assert "dmesg" in LOCAL.error("a", os_error(errno.EIO)).hint
    assert type(REMOTE.error("a", os_error(errno.EIO))) is Transient
    assert "file server" in REMOTE.error("a", os_error(errno.EIO)).hint


def test_within_it_an_oserror_is_a_store_error_with_its_cause() -> None:
    cause = os_error(errno.ENOSPC)
    with pytest.raises(StoreError) as caught, LOCAL.about("run/a"):
        raise cause
    assert caught.value.__cause__ is cause


def test_a_taken_name_is_exists_and_an_absence_is_the_callers_to_name() -> None:
    with pytest.raises(Exists, match="run/a: already there"), LOCAL.about("run/a"):
        raise FileExistsError(errno.EEXIST, "File exists")
    with pytest.raises(StoreError) as caught, LOCAL.about("run/a"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert not isinstance(caught.value, NotFound)


def test_errors_that_are_ours_pass_through() -> None:
    with pytest.raises(NotFound), LOCAL.about("run/a"):
        raise NotFound("run/b")
