"""A store of each kind, and the world around it.

A scenario that needs one kind only says so by `@pytest.mark.stores("path")`.  `make test` takes the
first kind of each; of the scenarios marked `@pytest.mark.each_store` one takes a path, the next S3,
the next SFTP, by their names.  `make exhaustive` and CI take all kinds of all.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.scenarios.stores import KINDS, Store, remove, store_of
from tests.scenarios.world import BASE, PATIENCE, World, files_below
from tests.support.exhaustive import ALL


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_given = any(
        "store" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    )
    if "store" in metafunc.fixturenames and not is_given:
        marker = metafunc.definition.get_closest_marker("stores")
        kinds = marker.args if marker else KINDS
        is_each = metafunc.definition.get_closest_marker("each_store") is not None
        number = zlib.crc32(metafunc.function.__name__.encode()) % len(kinds) if is_each else 0
        metafunc.parametrize("store", kinds if ALL else (kinds[number],), indirect=True)


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


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Stores that hold VERIFIED checkpoints, each made once for all processes of this test run."""
    run, base = os.environ.get("PYTEST_XDIST_TESTRUNUID"), tmp_path_factory.getbasetemp()
    return Prepared(base.parent / f"prepared-{run}" if run else base / "prepared")


class Prepared:
    """`prepared(vector, 1, 2)`: the files of a store with `sft/checkpoint-1` and
    `sft/checkpoint-2`, VERIFIED, from the nodes of that vector.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(exist_ok=True)

    def __call__(self, vector: str, *steps: int) -> Mapping[str, bytes]:
        home = self._root / "-".join([vector, *map(str, steps)])
        made = home / "made"
        try:
            home.mkdir()
        except FileExistsError:
            end = time.monotonic() + PATIENCE
            while not made.exists():
                assert time.monotonic() < end, (
                    "another process of this test run has not made the store"
                )
                time.sleep(0.1)
        else:
            self._make(home, vector, steps)
            made.touch()
        return {
            name: data
            for name, data in files_below(home / "store").items()
            if not name.startswith(".ckptsync/nodes/")
        }

    @staticmethod
    def _make(home: Path, vector: str, steps: tuple[int, ...]) -> None:
        world = World(home, store_of("path", home))
        try:
            for seed, step in enumerate(steps):
                world.push_save("sft", vector, step, seed=seed)
            world.at_store("consolidate", "--config-from", BASE)
            world.verify("--level", "parse")
        finally:
            world.close()
