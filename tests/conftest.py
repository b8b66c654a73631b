"""What holds for every test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ckptsync.spool import safe_files
from ckptsync.stores import progress_signs
from tests.support.exhaustive import ALL

# An example that waits for a busy machine is no failure.
settings.register_profile("untimed", deadline=None, max_examples=150 if ALL else 40)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the scenarios: some wait for a minute, while others run."""
    items.sort(key=lambda item: "scenarios" not in item.path.parts)


@pytest.fixture(scope="session", autouse=True)
def _no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for the next time lies in a directory of this test run, also that of their
    child processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _programs_do_not_inherit_ignored_signals() -> None:
    """Let programs that tests start receive SIGHUP and SIGINT.

    nohup ignores the one, a shell's background job the other, and a program inherits that. A
    signal with a handler here has its default action there.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_end_outlasts_its_test() -> Iterator[None]:
    """A process that was told to end reads nothing to its end; this one runs other tests."""
    yield
    progress_signs.clear_shutdown()


@pytest.fixture(autouse=True)
def _garbage_of_commands_is_garbage() -> Iterator[None]:
    """A command keeps what it has made from the cycle collector, since its process ends with it.

    Here it would keep open files too.
    """
    yield
    gc.unfreeze()


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """The spool of an output directory, with nothing in it."""
    safe_files.make_folders(tmp_path / "_ckptsync")
    return tmp_path / "_ckptsync"
