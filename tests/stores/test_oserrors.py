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


@pytest.mark.parametrize("telling", [LOCAL, REMOTE])
def test_what_passes_is_told_from_what_does_not(telling: StoreErrors) -> None:
    for code in PASSING:
        assert type(telling.error("a", os_error(code))) is Transient
    for code in REFUSED:
        assert type(telling.error("a", os_error(code))) is StoreError


def test_a_taken_name_is_exists_and_an_absence_is_the_callers_to_name() -> None:
    with pytest.raises(Exists, match="run/a: already there"), LOCAL.about("run/a"):
        raise FileExistsError(errno.EEXIST, "File exists")
    with pytest.raises(StoreError) as caught, LOCAL.about("run/a"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert not isinstance(caught.value, NotFound)
