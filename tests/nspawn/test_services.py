"""The units as an operator installs them, in one machine that really boots: worker and head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nspawn.machine import ROOT, Machine

WORKER, HEAD = "ckptsync-worker@train", "ckptsync-head"
STORE = "/mnt/checkpoints"
CONFIG = """\
node: {node}
roles: [{roles}]
store: {{url: /mnt/checkpoints}}
worker: {{runs: [/data/out/*], quiet: 200ms, scan_every: 1s}}
head: {{every: 1s}}
verify: {{tick: 1s}}
"""
SLOW = "limits: {bandwidth: 5KB/s, stall: 1s}\n"
SAVED = ROOT / "tests/vectors/hf-ddp/out/checkpoint-4"


def configure(machine: Machine, name: str = "train", more: str = "", roles: str = "") -> None:
    roles = roles or ("head, verifier" if name == "head" else "worker")
    machine.write(f"/etc/ckptsync/{name}.yaml", CONFIG.format(node=f"a-{name}", roles=roles) + more)


def start(machine: Machine, name: str = "train", more: str = "", extra: str = "") -> None:
    """Configure, install as the output of the command says, and start."""
    configure(machine, name, more)
    machine.run("ckptsync", "service", "install", "-c", f"/etc/ckptsync/{name}.yaml")
    unit = HEAD if name == "head" else f"ckptsync-worker@{name}"
    edited = f"[Service]\nRestartSec=100ms\n{extra}"
    machine.write(f"/etc/systemd/system/{unit}.service.d/override.conf", edited)
    machine.systemctl("daemon-reload")
    machine.systemctl("start", unit)


def save(machine: Machine, step: int, output: str = "/data/out/exp", size: int = 0) -> None:
    """A checkpoint of a user's, readable for nobody else, as safetensors 0.8 writes it.

    ``size`` bytes more.
    """
    folder = f"{output}/checkpoint-{step}"
    more = f"head -c {size} /dev/urandom > {folder}/extra.bin; " if size else ""
    state = (
        f'sed \'s/"global_step": 4/"global_step": {step}/\' {SAVED}/trainer_state.json >'
        f" {folder}/trainer_state.json"
    )
    machine.run_as(
        "train",
        "sh",
        "-ec",
        f"umask 077; mkdir -p {folder}; cp {SAVED}/*.* {folder}; rm {folder}/trainer_state.json;"
        f" {more}{state}",
    )


def has_manifest(machine: Machine, step: int, run: str = "exp") -> bool:
    manifests = f"{run}/.ckptsync/checkpoint-{step}*/manifest-*.json"
    return any(machine.path(STORE).glob(manifests))


def wait_until_stored(machine: Machine, step: int, run: str = "exp") -> None:
    lacking = f"{run}/checkpoint-{step} is not in the store"
    machine.wait_for(lacking, lambda: has_manifest(machine, step, run))


def wait_until_verified(machine: Machine, count: int = 1) -> None:
    """Until so many locations are, as the head's own user sees it."""
    ls = ("env", f"CKPTSYNC_STORE={STORE}", "/opt/ckptsync/bin/ckptsync", "ls")
    machine.wait_for(
        "it is not verified",
        lambda: machine.run_as("ckptsync", *ls, check=False).count("VERIFIED") == count,
    )


def wait_until_said(machine: Machine, unit: str, *words: str) -> None:
    """Until the journal has all of these: it takes what a service says later than that is said."""
    for said in words:
        machine.wait_for(
            f"no {said!r}",
            lambda said=said: said in machine.journal("-u", unit),  # type: ignore[misc]
        )


def pid_of(machine: Machine, unit: str = WORKER) -> str:
    return machine.property(unit, "MainPID")


def children(machine: Machine) -> list[str]:
    """Processes of the head's that merge or verify."""
    return machine.run("pgrep", "-P", pid_of(machine, HEAD), check=False).split()


def wait_for_child(machine: Machine) -> str:
    machine.wait_for("no child", lambda: bool(children(machine)))
    return children(machine)[0]


def says_who_it_is(machine: Machine, unit: str, uid: int) -> None:
    """It has told systemd that it is up, runs as that user, and has no capability."""
    assert machine.property(unit, "StatusText")
    status = machine.path(f"/proc/{pid_of(machine, unit)}/status").read_text()
    assert re.search(rf"^Uid:\t{uid}\t{uid}", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    told = machine.run("systemd-analyze", "security", "--no-pager", f"{unit}.service")
    assert float(re.findall(r"exposure level .*: ([\d.]+)", told)[0]) <= 2.0


@pytest.fixture
def node(machine: Machine) -> Iterator[Machine]:
    """The machine with an empty store and a place for a training's output."""
    machine.run(
        "sh",
        "-ec",
        f"rm -rf /data/* {STORE} /etc/ckptsync /etc/systemd/system/ckptsync-*;"
        " mkdir -p /etc/ckptsync",
    )
    machine.run("install", "-d", "-o", "train", "-g", "train", "/data/out")
    machine.run("install", "-d", "-m", "2775", "-g", "ckptsync", "-o", "train", STORE)
    yield machine
    machine.systemctl("disable", WORKER, HEAD, check=False)
    machine.systemctl("stop", "ckptsync-*", check=False)
    machine.systemctl("reset-failed")


def test_worker_and_head_take_a_checkpoint_from_a_training_to_verified_also_after_a_reboot(
    node: Machine,
) -> None:
    start(node)
    says_who_it_is(node, WORKER, 64201)
    save(node, 1)
    wait_until_stored(node, 1)
    source = node.path("/data/out/exp/checkpoint-1/model.safetensors").stat()
    pins = node.path("/data/out/exp/_ckptsync/pins").glob("checkpoint-1.*/files/model.safetensors")
    assert source.st_mode & 0o777 == 0o600
    assert [pin.stat().st_ino for pin in pins] == [source.st_ino], "linked within the unit's mounts"
    start(node, "head")
    says_who_it_is(node, HEAD, 64203)
    wait_until_verified(node)
    node.systemctl("enable", WORKER, HEAD)
    save(node, 2)
    node.reboot()
    assert node.property(WORKER, "ActiveState") in ("active", "activating")
    wait_until_verified(node, 2)


def test_one_service_has_all_roles_with_the_drop_in_that_install_adds(node: Machine) -> None:
    configure(node, roles="worker, head, verifier")
    node.run("ckptsync", "service", "install", "--as", "train")
    node.systemctl("daemon-reload")
    assert node.property(WORKER, "MemoryMax") == str(4 << 30)
    node.systemctl("start", WORKER)
    save(node, 1)
    wait_until_verified(node)


def test_a_file_that_is_still_written_is_noticed_from_within_the_service(node: Machine) -> None:
    save(node, 5)
    writes = "exec 3>>/data/out/exp/checkpoint-5/model.safetensors; sleep 1000"
    node.run("systemd-run", "--quiet", "--unit=trainer", "--uid=train", "sh", "-c", writes)
    start(node)
    save(node, 6)
    wait_until_stored(node, 6)
    assert not has_manifest(node, 5)
    node.systemctl("stop", "trainer")
    wait_until_stored(node, 5)


def test_a_hung_worker_is_killed_leaves_its_stacks_and_starts_again(node: Machine) -> None:
    start(node, extra="WatchdogSec=10\n")
    hung = pid_of(node)
    node.run("kill", "-STOP", hung)
    node.wait_for("it is not started again", lambda: pid_of(node) not in ("0", hung))
    is_up = "ActiveState"
    node.wait_for("it is not up again", lambda: node.property(WORKER, is_up) == "active")
    wait_until_said(node, WORKER, "Watchdog timeout", "Fatal Python error: Aborted")
    save(node, 6)
    wait_until_stored(node, 6)


def has_bytes(part: Path) -> bool:
    """Whether a file that may be renamed or deleted at any moment is there and not empty."""
    try:
        return part.stat().st_size > 0
    except FileNotFoundError:
        return False


def test_a_stop_parks_what_is_being_sent_in_time_and_the_next_start_ends_it(
    node: Machine,
) -> None:
    start(node, more="limits: {bandwidth: 500KB/s}\n")
    save(node, 7, size=16 << 20)
    node.wait_for(
        "nothing is sent",
        lambda: any(has_bytes(p) for p in node.path(STORE).rglob("*.part")),
    )
    node.systemctl("stop", WORKER)
    assert node.property(WORKER, "Result") == "success"
    assert not has_manifest(node, 7)
    configure(node)
    node.systemctl("start", WORKER)
    wait_until_stored(node, 7)


@pytest.fixture
def head(node: Machine) -> Machine:
    """With a checkpoint in the store, as a worker of another user has sent it."""
    save(node, 1)
    push = "/opt/ckptsync/bin/ckptsync push /data/out/exp/checkpoint-1 --run exp"
    node.run_as("train", "sh", "-c", f"umask 002; CKPTSYNC_STORE={STORE} {push}")
    node.run_as("train", "rm", "-r", "/data/out/exp/checkpoint-1")
    return node


def test_a_hung_head_is_killed_with_its_children_leaves_its_stacks_and_starts_again(
    head: Machine,
) -> None:
    start(head, "head", SLOW, "WatchdogSec=10\n")
    hung, child = pid_of(head, HEAD), wait_for_child(head)
    configure(head, "head")
    head.run("kill", "-STOP", hung)
    head.wait_for("it is not started again", lambda: pid_of(head, HEAD) not in ("0", hung))
    assert not head.path(f"/proc/{child}").exists()
    wait_until_said(head, HEAD, "Watchdog timeout", "Fatal Python error: Aborted")
    wait_until_verified(head)


def test_a_stop_ends_children_in_time_and_the_next_start_ends_what_they_did(head: Machine) -> None:
    start(head, "head", SLOW)
    child = wait_for_child(head)
    before = head.journal("-u", HEAD)
    head.systemctl("stop", HEAD)
    assert head.property(HEAD, "Result") == "success"
    assert not head.path(f"/proc/{child}").exists()
    assert "SIGKILL" not in head.journal("-u", HEAD).removeprefix(before)
    start(head, "head")
    wait_until_verified(head)


def score(head: Machine, process: str) -> int:
    return int(head.path(f"/proc/{process}/oom_score_adj").read_text())


def test_a_child_that_takes_all_memory_dies_alone(head: Machine) -> None:
    start(head, "head", SLOW)
    daemon, child = pid_of(head, HEAD), wait_for_child(head)
    assert head.property(HEAD, "OOMPolicy") == "continue"
    head.wait_for("it is not the first to go", lambda: score(head, child) > score(head, daemon))
    head.run("kill", "-KILL", child)
    head.wait_for("it is not said", lambda: "was killed" in head.journal("-u", HEAD))
    assert (pid_of(head, HEAD), head.property(HEAD, "ActiveState")) == (daemon, "active")
