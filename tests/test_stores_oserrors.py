from __future__ import annotations

import errno
import os

import pytest

from ckptsync.errors import Exists, NotFound, StoreError
from ckptsync.stores.oserrors import HINTS, store_error, told_of


@pytest.mark.parametrize("code", HINTS)
def test_what_the_operator_can_do_something_about_has_a_hint(code: int) -> None:
    told = store_error("run/a", OSError(code, os.strerror(code)))
    assert str(told) == f"run/a: {os.strerror(code).lower()}"
    assert told.hint == HINTS[code]


def test_anything_else_is_told_as_it_is() -> None:
    assert str(store_error("run/a", OSError(errno.EIO, "Input/output error"))) == "run/a: input/output error"
    assert str(store_error("run/a", OSError("Odd"))) == "run/a: odd"


def test_within_it_an_oserror_is_a_store_error_with_its_cause() -> None:
    cause = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreError) as caught, told_of("run/a"):
        raise cause
    assert caught.value.__cause__ is cause
    assert type(caught.value) is StoreError


def test_a_taken_name_is_exists_and_an_absence_is_the_callers_to_name() -> None:
    with pytest.raises(Exists, match="run/a: already there"), told_of("run/a"):
        raise FileExistsError(errno.EEXIST, "File exists")
    with pytest.raises(StoreError) as caught, told_of("run/a"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert not isinstance(caught.value, NotFound)


def test_errors_that_are_ours_pass_through() -> None:
    with pytest.raises(NotFound), told_of("run/a"):
        raise NotFound("run/b")
