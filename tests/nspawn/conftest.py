"""One machine for all tests here: only `make nspawn` asks for them, since they want root, and the
machine's own control groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.nspawn.machine import CannotBootError, Machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if "CKPTSYNC_TEST_NSPAWN" not in os.environ:
        pytest.skip("make nspawn runs it")
    try:
        machine = Machine(tmp_path_factory.mktemp("machine"))
    except CannotBootError as e:
        pytest.skip(str(e))
    yield machine
    machine.close()
