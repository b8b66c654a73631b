"""The units as an operator installs them, under real systemd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nspawn.machine import ROOT, Machine

WORKER = "ckptsync-worker@train"
CONFIG = """\
node: a-{user}
roles: [worker]
store: {{url: {store}}}
worker:
  runs: [{runs}]
  quiet: 200ms
  scan_every: 1s
"""
QUICK = "[Service]\nRestartSec=100ms\n"
SAVED = ROOT / "tests/vectors/hf-ddp/out/checkpoint-4"


def configure(
    machine: Machine,
    user: str = "train",
    store: str = "/data/store",
    runs: str = "/data/out/*",
    more: str = "",
) -> None:
    machine.write(
        f"/etc/ckptsync/{user}.yaml", CONFIG.format(user=user, store=store, runs=runs) + more
    )


def install(machine: Machine, user: str = "train", extra: str = QUICK) -> None:
    """As the output of the command says."""
    machine.run("ckptsync", "service", "install", "--as", user)
    machine.write(f"/etc/systemd/system/ckptsync-worker@{user}.service.d/20-test.conf", extra)
    machine.systemctl("daemon-reload")


def start(machine: Machine, extra: str = QUICK, **how: str) -> None:
    """Configure, install and start the worker."""
    configure(machine, **how)
    install(machine, extra=extra)
    machine.systemctl("start", WORKER)


def save(
    machine: Machine, step: int, output: str = "/data/out/exp", user: str = "train", size: int = 0
) -> None:
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
        user,
        "sh",
        "-ec",
        f"umask 077; mkdir -p {folder}; cp {SAVED}/*.* {folder}; rm {folder}/trainer_state.json;"
        f" {more}{state}",
    )


def is_stored(machine: Machine, step: int, run: str = "exp") -> bool:
    manifests = f"{run}/.ckptsync/checkpoint-{step}*/manifest-*.json"
    return any(machine.path("/data/store").glob(manifests))


def wait_until_stored(machine: Machine, step: int, run: str = "exp") -> None:
    lacking = f"{run}/checkpoint-{step} is not in the store"
    machine.wait_for(lacking, lambda: is_stored(machine, step, run))


def verified(machine: Machine) -> int:
    """How many locations are, as the head's own user sees it."""
    ls = ("/opt/ckptsync/bin/ckptsync", "ls", "--store", "/data/store")
    return machine.run_as("ckptsync", *ls, check=False).count("VERIFIED")


def pid_of(machine: Machine, unit: str = WORKER) -> str:
    return machine.property(unit, "MainPID")


def clear(machine: Machine) -> None:
    """Leave nothing of a test before, but an empty store and a location for a training's output."""
    gone = "rm -rf /data/* /etc/ckptsync /etc/systemd/system/ckptsync-*; mkdir -p /etc/ckptsync"
    machine.run("sh", "-ec", gone)
    machine.run("install", "-d", "-o", "train", "-g", "train", "/data/out")
    machine.run("install", "-d", "-m", "2775", "-g", "ckptsync", "-o", "train", "/data/store")


@pytest.fixture
def training(machine: Machine) -> Iterator[Machine]:
    """A machine with a store and a location for a training's output."""
    clear(machine)
    yield machine
    machine.systemctl("disable", "--now", WORKER, check=False)
    machine.systemctl("stop", "ckptsync-*", check=False)
    machine.systemctl("reset-failed")


def test_a_worker_starts_as_the_user_who_trains_says_so_and_sends(training: Machine) -> None:
    start(training)
    assert training.property(WORKER, "StatusText")
    status = training.path(f"/proc/{pid_of(training)}/status").read_text()
    assert re.search(r"^Uid:\t64201\t64201", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    save(training, 5)
    wait_until_stored(training, 5)


def test_what_only_its_owner_may_read_is_pinned_by_a_link_within_the_service_s_mounts(
    training: Machine,
) -> None:
    configure(training)
    install(training)
    save(training, 5)
    training.systemctl("start", WORKER)
    wait_until_stored(training, 5)
    source = training.path("/data/out/exp/checkpoint-5/model.safetensors").stat()
    pinned = next(
        training.path("/data/out/exp/_ckptsync/pins").glob("checkpoint-5.*/files/model.safetensors")
    ).stat()
    assert source.st_mode & 0o777 == 0o600
    assert pinned.st_ino == source.st_ino


def test_a_file_that_is_still_written_is_noticed_from_within_the_service(training: Machine) -> None:
    configure(training)
    install(training)
    save(training, 5)
    writes = "exec 3>>/data/out/exp/checkpoint-5/model.safetensors; sleep 1000"
    training.run("systemd-run", "--quiet", "--unit=trainer", "--uid=train", "sh", "-c", writes)
    training.systemctl("start", WORKER)
    save(training, 6)
    wait_until_stored(training, 6)
    assert not is_stored(training, 5)
    training.systemctl("stop", "trainer")
    wait_until_stored(training, 5)


def test_an_output_directory_that_is_removed_and_made_again_is_seen(training: Machine) -> None:
    training.run("install", "-d", "-o", "train", "/data/special")
    start(training, runs="/data/special/out")
    save(training, 1, output="/data/special/out")
    wait_until_stored(training, 1, run="out")
    training.run_as("train", "rm", "-r", "/data/special/out")
    save(training, 2, output="/data/special/out")
    wait_until_stored(training, 2, run="out")


def test_a_hung_worker_is_killed_leaves_its_stacks_and_starts_again(training: Machine) -> None:
    start(training, f"{QUICK}WatchdogSec=2\n")
    hung = pid_of(training)
    training.run("kill", "-STOP", hung)
    training.wait_for("it is not started again", lambda: pid_of(training) not in ("0", hung))
    is_up = "ActiveState"
    training.wait_for("it is not up again", lambda: training.property(WORKER, is_up) == "active")
    said = training.journal("-u", WORKER)
    assert "Watchdog timeout" in said
    assert "Fatal Python error: Aborted" in said
    save(training, 6)
    wait_until_stored(training, 6)


def has_bytes(part: Path) -> bool:
    """Whether a file that may be renamed or deleted at any moment is there and not empty."""
    try:
        return part.stat().st_size > 0
    except FileNotFoundError:
        return False


def test_a_stop_parks_what_is_being_sent_in_time_and_the_next_start_ends_it(
    training: Machine,
) -> None:
    start(training, more="limits: {bandwidth: 2MB/s}\n")
    save(training, 7, size=16 << 20)
    training.wait_for(
        "nothing is sent",
        lambda: any(has_bytes(p) for p in training.path("/data/store").rglob("*.part")),
    )
    training.systemctl("stop", WORKER)
    assert training.property(WORKER, "Result") == "success"
    assert not is_stored(training, 7)
    configure(training)
    training.systemctl("start", WORKER)
    wait_until_stored(training, 7)


def test_a_worker_is_back_after_a_reboot_and_sends_what_was_written_without_it(
    training: Machine,
) -> None:
    configure(training)
    install(training)
    training.systemctl("enable", WORKER)
    save(training, 8)
    training.reboot()
    assert training.property(WORKER, "ActiveState") in ("active", "activating")
    wait_until_stored(training, 8)


def test_a_reload_starts_the_service_again_with_the_new_configuration(training: Machine) -> None:
    start(training)
    before = pid_of(training)
    training.run("install", "-d", "-o", "train", "/data/out/elsewhere")
    configure(training, runs="/data/out/elsewhere/*")
    training.systemctl("reload", WORKER)
    save(training, 9, output="/data/out/elsewhere/late")
    wait_until_stored(training, 9, run="late")
    assert pid_of(training) != before


def test_a_wrong_configuration_is_not_tried_again(training: Machine) -> None:
    configure(training)
    install(training)
    training.write("/etc/ckptsync/train.yaml", "store: {urk: /data/store}\n")
    training.systemctl("start", WORKER, check=False)
    training.wait_for(
        "it does not fail", lambda: training.property(WORKER, "ActiveState") == "failed"
    )
    assert training.property(WORKER, "ExecMainStatus") == "2"
    assert training.property(WORKER, "NRestarts") == "0"
    assert "did you mean store.url" in training.journal("-u", WORKER)


def test_shared_memory_of_a_training_survives_the_stop_of_the_worker(training: Machine) -> None:
    configure(training)
    install(training)
    training.run_as("train", "touch", "/dev/shm/torch_1")
    training.systemctl("start", WORKER)
    training.systemctl("stop", WORKER)
    assert training.path("/dev/shm/torch_1").exists()


def test_ray_s_session_that_begins_after_the_worker_is_seen(training: Machine) -> None:
    start(training, runs="/tmp/ray/session_*/artifacts/*")
    save(training, 3, output="/tmp/ray/session_2026/artifacts/tune")
    training.wait_for(
        "it is not stored",
        lambda: bool(list(training.path("/data/store").rglob("manifest-*.json"))),
    )


@pytest.mark.parametrize("store", ["/data/store", "sftp://head/checkpoints"])
def test_a_worker_is_shut_in_well_and_has_a_network_only_where_its_store_wants_one(
    training: Machine, store: str
) -> None:
    start(training, store=store)
    own, all_s = (
        training.path(f"/proc/{pid}/ns/net").readlink() for pid in (pid_of(training), "1")
    )
    assert (own == all_s) == ("://" in store)
    said = training.run(
        "systemd-analyze", "security", "--no-pager", "--threshold=20", f"{WORKER}.service"
    )
    assert float(re.findall(r"exposure level .*: ([\d.]+)", said)[0]) <= 2.0


def test_a_key_for_root_alone_reaches_the_worker_and_one_that_is_absent_is_no_harm(
    training: Machine,
) -> None:
    configure(training)
    install(training)
    training.write("/etc/credstore/ckptsync.train.aws", "[default]\n")
    training.run("chmod", "0600", "/etc/credstore/ckptsync.train.aws")
    training.systemctl("start", WORKER)
    within = ("nsenter", "-t", pid_of(training), "-m", "runuser", "-u", "train", "--")
    assert training.run(*within, "ls", f"/run/credentials/{WORKER}.service") == "aws\n"


def test_a_training_of_root_s_as_in_many_containers_is_served_without_root_s_power(
    training: Machine,
) -> None:
    training.run("chown", "root:root", "/data/store", "/data/out")
    configure(training, "root")
    install(training, "root")
    save(training, 5, user="root")
    training.systemctl("start", "ckptsync-worker@root")
    wait_until_stored(training, 5)
    status = training.path(f"/proc/{pid_of(training, 'ckptsync-worker@root')}/status").read_text()
    assert "CapEff:\t0000000000000000" in status


def test_two_users_and_a_head_of_a_third_share_one_store(training: Machine) -> None:
    group = f"{QUICK}SupplementaryGroups=ckptsync\n"
    training.run("install", "-d", "-o", "other", "/data/others")
    for user, runs in (("train", "/data/out/*"), ("other", "/data/others/*")):
        configure(training, user, runs=runs)
        install(training, user, group)
        training.systemctl("start", f"ckptsync-worker@{user}")
    save(training, 1)
    save(training, 2, "/data/others/exp2", "other")
    training.write(
        "/etc/ckptsync/head.yaml",
        "roles: [head, verifier]\n"
        "store: {url: /data/store}\n"
        "head: {every: 1s}\n"
        "verify: {tick: 1s}\n",
    )
    training.run("ckptsync", "service", "install", "-c", "/etc/ckptsync/head.yaml")
    training.systemctl("daemon-reload")
    training.systemctl("start", "ckptsync-head")
    training.wait_for("not both are verified", lambda: verified(training) == 2)
    assert training.path("/data/store/exp2").stat().st_uid == 64202


def test_a_user_s_own_systemd_runs_the_worker_too(training: Machine) -> None:
    text = CONFIG.format(user="train", store="/data/store", runs="/data/out/*")
    training.write("/home/train/.config/ckptsync/worker.yaml", text)
    training.run("chown", "-R", "train:train", "/home/train/.config")
    training.run("loginctl", "enable-linger", "train")
    own = ("env", "HOME=/home/train", "XDG_RUNTIME_DIR=/run/user/64201")
    training.wait_for(
        "no systemd of the user's",
        lambda: training.path("/run/user/64201/systemd/private").exists(),
    )
    training.run_as("train", *own, "ckptsync", "service", "install", "--user")
    training.run_as("train", *own, "systemctl", "--user", "daemon-reload")
    training.run_as("train", *own, "systemctl", "--user", "enable", "--now", "ckptsync-worker")
    save(training, 4)
    wait_until_stored(training, 4)
    training.run_as("train", *own, "systemctl", "--user", "disable", "--now", "ckptsync-worker")
    training.run("loginctl", "disable-linger", "train")


def test_a_worker_that_is_uninstalled_is_gone_and_asked_to_be_stopped_before(
    training: Machine,
) -> None:
    configure(training)
    install(training)
    training.systemctl("enable", "--now", WORKER)
    refused = training.run("sh", "-c", "ckptsync service uninstall --as train 2>&1", check=False)
    assert f"systemctl disable --now {WORKER}" in refused
    training.systemctl("disable", "--now", WORKER)
    training.run("rm", f"/etc/systemd/system/{WORKER}.service.d/20-test.conf")
    training.run("ckptsync", "service", "uninstall", "--as", "train")
    training.systemctl("daemon-reload")
    assert training.property(WORKER, "LoadState") == "not-found"
    assert not list(training.path("/etc/systemd/system").glob("ckptsync-*"))
    assert training.path("/etc/ckptsync/train.yaml").exists()
