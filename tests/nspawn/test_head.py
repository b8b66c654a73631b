"""The head's unit as an operator installs it, under real systemd: its child processes among what it
is asked to keep alive, and to end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.nspawn.machine import Machine
from tests.nspawn.test_services import clear, save, verified

HEAD = "ckptsync-head"
CONFIG = (
    "node: h\n"
    "roles: [head, verifier]\n"
    "store: {url: /data/store}\n"
    "head: {every: 1s}\n"
    "verify: {tick: 1s}\n"
)
SLOW = "limits: {bandwidth: 20KB/s, stall: 1s}\n"
QUICK = "[Service]\nRestartSec=100ms\n"


def start(machine: Machine, more: str = "", extra: str = QUICK) -> None:
    """Install it as an operator does, and start it."""
    install(machine, more, extra)
    machine.systemctl("start", HEAD)


def install(machine: Machine, more: str = "", extra: str = QUICK) -> None:
    machine.write("/etc/ckptsync/head.yaml", CONFIG + more)
    machine.run("ckptsync", "service", "install", "-c", "/etc/ckptsync/head.yaml")
    machine.write(f"/etc/systemd/system/{HEAD}.service.d/20-test.conf", extra)
    machine.systemctl("daemon-reload")


def send(machine: Machine, step: int) -> None:
    """A checkpoint, as a worker of another user would have sent it."""
    save(machine, step)
    machine.run_as(
        "train",
        "sh",
        "-c",
        f"umask 002; /opt/ckptsync/bin/ckptsync push /data/out/exp/checkpoint-{step}"
        " --store /data/store"
        " --run exp",
    )
    machine.run_as("train", "rm", "-r", f"/data/out/exp/checkpoint-{step}")


def pid(machine: Machine) -> str:
    return machine.property(HEAD, "MainPID")


def children(machine: Machine) -> list[str]:
    """Of the head's daemon that do an order of its."""
    found = machine.run(
        "pgrep", "-P", pid(machine), "-f", "ckptsync.service.job_process", check=False
    )
    return found.split()


def wait_for_child(machine: Machine) -> str:
    machine.wait_for("no child", lambda: bool(children(machine)))
    return children(machine)[0]


@pytest.fixture
def head(machine: Machine) -> Iterator[Machine]:
    """A machine with a store, and nothing of a test before."""
    clear(machine)
    send(machine, 1)
    yield machine
    machine.systemctl("disable", "--now", HEAD, check=False)
    machine.systemctl("stop", HEAD, check=False)
    machine.systemctl("reset-failed")


def test_a_head_starts_as_its_own_user_says_so_and_verifies(head: Machine) -> None:
    start(head)
    assert head.property(HEAD, "StatusText")
    status = head.path(f"/proc/{pid(head)}/status").read_text()
    assert re.search(r"^Uid:\t64203\t64203", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    head.wait_for("it is not verified", lambda: verified(head) == 1)
    said = head.run(
        "systemd-analyze", "security", "--no-pager", "--threshold=20", f"{HEAD}.service"
    )
    assert float(re.findall(r"exposure level .*: ([\d.]+)", said)[0]) <= 2.0


def test_a_child_that_hangs_is_killed_and_tried_again_while_the_head_goes_on(head: Machine) -> None:
    start(head, SLOW)
    daemon, hung = pid(head), wait_for_child(head)
    head.run("kill", "-STOP", hung)
    for _ in range(2):  # limits.stall and a minute
        if "no progress" not in head.journal("-u", HEAD):
            head.run("sleep", "40")
    head.wait_for(
        "it is not said", lambda: "killed: no progress for 61 s" in head.journal("-u", HEAD)
    )
    assert hung not in children(head)
    assert (pid(head), head.property(HEAD, "NRestarts")) == (daemon, "0")


def test_a_hung_head_is_killed_with_its_children_leaves_its_stacks_and_starts_again(
    head: Machine,
) -> None:
    start(head, SLOW, f"{QUICK}WatchdogSec=3\n")
    hung, child = pid(head), wait_for_child(head)
    head.run("kill", "-STOP", hung)
    head.wait_for("it is not started again", lambda: pid(head) not in ("0", hung))
    assert not head.path(f"/proc/{child}").exists()
    said = head.journal("-u", HEAD)
    assert "Watchdog timeout" in said
    assert "Fatal Python error: Aborted" in said
    install(head, extra=QUICK)
    head.systemctl("restart", HEAD)
    head.wait_for("it is not verified", lambda: verified(head) == 1)


def test_a_stop_ends_children_in_time_and_the_next_start_ends_what_they_did(head: Machine) -> None:
    start(head, SLOW)
    child = wait_for_child(head)
    before = head.journal("-u", HEAD)
    head.systemctl("stop", HEAD)
    assert head.property(HEAD, "Result") == "success"
    assert not head.path(f"/proc/{child}").exists()
    assert "SIGKILL" not in head.journal("-u", HEAD).removeprefix(before)
    start(head)
    head.wait_for("it is not verified", lambda: verified(head) == 1)


def score(head: Machine, process: str) -> int:
    return int(head.path(f"/proc/{process}/oom_score_adj").read_text())


def test_a_child_that_takes_all_memory_dies_alone(head: Machine) -> None:
    start(head, SLOW)
    daemon, child = pid(head), wait_for_child(head)
    assert head.property(HEAD, "OOMPolicy") == "continue"
    head.wait_for("it is not the first to go", lambda: score(head, child) > score(head, daemon))
    head.run("kill", "-KILL", child)
    head.wait_for("it is not said", lambda: "its process was killed" in head.journal("-u", HEAD))
    assert (pid(head), head.property(HEAD, "ActiveState")) == (daemon, "active")


def test_a_head_is_back_after_a_reboot(head: Machine) -> None:
    install(head)
    head.systemctl("enable", HEAD)
    head.reboot()
    head.wait_for("it is not verified", lambda: verified(head) == 1)


def test_a_reload_starts_a_head_again_and_ends_the_children_of_before(head: Machine) -> None:
    start(head, SLOW)
    daemon, child = pid(head), wait_for_child(head)
    head.write("/etc/ckptsync/head.yaml", CONFIG)
    head.systemctl("reload", HEAD)
    head.wait_for("it is not verified", lambda: verified(head) == 1)
    assert pid(head) != daemon
    assert not head.path(f"/proc/{child}").exists()
