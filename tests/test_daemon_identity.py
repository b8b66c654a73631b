"""Which process this is, and whether another one lives."""

import os
import subprocess
import sys
from dataclasses import replace

from ckptsync.daemon.identity import began, heartbeat, is_running


def test_a_process_is_running_and_has_an_instance_of_its_own() -> None:
    mine = heartbeat("n", ("worker",))
    assert is_running(replace(mine, pid=os.getppid(), began=began(os.getppid()))) is True
    assert heartbeat("n", ("worker",)).instance != mine.instance


def test_this_process_before_it_was_reloaded_is_not_running() -> None:
    assert is_running(heartbeat("n", ("worker",))) is False


def test_a_process_that_has_ended_is_not_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    mine = replace(heartbeat("n", ("worker",)), pid=child.pid, began=began(child.pid))
    child.wait()
    assert is_running(mine) is False


def test_a_process_that_was_killed_and_that_nobody_has_waited_for_is_not_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = replace(heartbeat("n", ("worker",)), pid=child.pid, began=began(child.pid))
    assert is_running(mine) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_running(mine) is False
    child.communicate()


def test_a_process_that_only_inherited_the_number_is_not_the_same() -> None:
    assert is_running(replace(heartbeat("n", ("worker",)), began="1")) is False
    assert is_running(replace(heartbeat("n", ("worker",)), pid=2**22 + 1, began="")) is False


def test_a_process_of_another_machine_cannot_be_asked() -> None:
    assert is_running(replace(heartbeat("n", ("worker",)), machine="another")) is None
    assert began(os.getpid()).isdigit()
