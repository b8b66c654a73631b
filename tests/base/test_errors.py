from __future__ import annotations

import pickle

import pytest

from ckptsync import errors
from ckptsync.errors import CkptsyncError, Corrupt, name_in_errors

CODES = {
    "CkptsyncError": 1,
    "ConfigError": 2,
    "Incomplete": 3,
    "StoreError": 4,
    "Transient": 4,
    "NotFound": 4,
    "Exists": 4,
    "Unsupported": 5,
    "Corrupt": 10,
}
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CkptsyncError)]


def test_exit_codes_are_an_interface_that_does_not_change() -> None:
    assert {c.__name__: c.exit_code for c in CLASSES} == CODES


@pytest.mark.parametrize("error", CLASSES)
def test_an_error_comes_back_from_another_process(error: type[CkptsyncError]) -> None:
    """Tasks of Ray carry errors as pickles."""
    back = pickle.loads(pickle.dumps(error("a: wrong", hint="do this")))
    assert (type(back), str(back), back.hint) == (error, "a: wrong", "do this")


def test_a_file_is_named_once_however_many_functions_name_it() -> None:
    with pytest.raises(Corrupt, match=r"^a: wrong$") as e, name_in_errors("a"), name_in_errors("a"):
        raise Corrupt("wrong", hint="do this")
    assert e.value.hint == "do this"
