"""The demo's children always end."""

import os
from pathlib import Path

import pytest

from ckptsync.cli.demo_nodes import check, running
from ckptsync.errors import CkptsyncError
from ckptsync.stores.opening import create_store
from tests.ticks import until


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    with running(tmp_path, {"head": {"nonsense": 1}}) as children:
        children[0].process.wait(20)
        with pytest.raises(CkptsyncError, match="head ended with exit code 2") as caught:
            check(children)
    assert str(tmp_path / "head.log") in caught.value.hint
    assert "nonsense: unknown key" in (tmp_path / "head.log").read_text()


def test_children_end_when_the_story_fails(tmp_path: Path) -> None:
    configuration = {"node": "n", "roles": ["head"], "store": {"url": str(tmp_path / "store")}}
    create_store(str(tmp_path / "store"))
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError), running(tmp_path / "etc", {"head": dict(configuration)}) as children:  # noqa: PT012 - the block is the story
        check(children)
        until(lambda: "phase=started" in children[0].log.read_text(), 20)
        pids.extend(child.process.pid for child in children)
        raise ZeroDivisionError
    assert pids
    log = (tmp_path / "etc" / "head.log").read_text()
    assert "phase=stopped" in log or "phase=abandoned" in log, "asked, not killed; abandoned where the disk stalls"
    assert not any(map(is_alive, pids))
