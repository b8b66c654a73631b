"""A store of each kind, and the world around it; a scenario that needs one kind only says so by `@pytest.mark.stores("path")`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.stores import KINDS, Store, remove, store_of
from tests.scenarios.world import World


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("stores")
        metafunc.parametrize("store", marker.args if marker else KINDS, indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    found = store_of(request.param, tmp_path)
    yield found
    remove(found)


@pytest.fixture
def world(store: Store, tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path, store)
    yield found
    found.close()
