"""A process that begins again in its own place."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.config.loading import read
from ckptsync.config.values import Config
from ckptsync.daemon.reloading import Reloading
from ckptsync.daemon.stopping import Stopping, stopping
from ckptsync.errors import ConfigError


@pytest.fixture
def stop() -> Iterator[Stopping]:
    with stopping() as stop:
        yield stop


def good() -> Config:
    return read("store: {url: /s}\nworker: {runs: [/a]}\n", "c", {})


def bad() -> Config:
    raise ConfigError("c:1: no good")


def test_a_wish_to_reload_is_heeded_once_and_only_where_the_configuration_is_well(stop: Stopping) -> None:
    Reloading(good, stop).heed()
    assert not stop.asked
    os.kill(os.getpid(), signal.SIGHUP)
    Reloading(bad, stop).heed()
    assert not stop.asked
    Reloading(good, stop).heed()
    assert not stop.asked, "the wish was refused, and is forgotten"
    os.kill(os.getpid(), signal.SIGHUP)
    Reloading(good, stop).heed()
    assert (stop.asked, stop.again, stop.code) == (True, True, 0)


AGAIN = """
import os, signal, sys
from ckptsync.daemon.reloading import leave, reap
from ckptsync.daemon.stopping import stopping
with stopping() as stop:
    reap()
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    {what}
    leave(stop)
"""


def begun(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AGAIN.format(what=what)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def lines(child: subprocess.Popen[str], count: int) -> list[str]:
    assert child.stdin
    assert child.stdout
    found = []
    for _ in range(count):
        found.append(child.stdout.readline().strip())
        child.stdin.write("\n")
        child.stdin.flush()
    return found


def test_it_begins_again_as_the_same_process_as_often_as_it_is_asked() -> None:
    with begun("stop.ask_again()") as child:
        assert lines(child, 3) == [str(child.pid)] * 3
        child.kill()


def test_an_end_that_is_asked_for_meanwhile_is_an_end() -> None:
    with begun("stop.ask_again(); os.kill(os.getpid(), signal.SIGTERM)") as child:
        assert lines(child, 1) == [str(child.pid)]
        assert child.wait(10) == 0


def test_a_fault_ends_it() -> None:
    with begun("stop.ask_again(); stop.ask(1)") as child:
        lines(child, 1)
        assert child.wait(10) == 1


CHILDREN = """
import os, subprocess, sys
if len(sys.argv) == 1:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    os.execv(sys.executable, [sys.executable, __file__, "again"])
from ckptsync.daemon.reloading import reap
def children():
    return len(open(f"/proc/self/task/{os.getpid()}/children").read().split())
before = children()
reap()
print(before, children())
"""


def test_children_of_the_process_before_are_taken_leave_of(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CHILDREN)
    assert subprocess.check_output([sys.executable, str(tmp_path / "program.py")], text=True) == "1 0\n"
