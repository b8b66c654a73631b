"""``ckptsync service install`` and ``uninstall`` without systemd (tests/nspawn has the rest)."""

from __future__ import annotations

import getpass
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckptsync.cli import service
from tests.support.command_line import Printed
from tests.support.stand_in_programs import ROOT

ME = getpass.getuser()
WORKER = "ckptsync-worker@.service"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of runs that are there; systemd's folder is the test's own."""
    monkeypatch.setattr(service, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(service, "CONFIGS", tmp_path / "home/ckptsync")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SUDO_USER", raising=False)
    (tmp_path / "store").mkdir()
    (tmp_path / "out").mkdir()
    return written(tmp_path, ME)


def written(tmp_path: Path, name: str, roles: str = "[worker]", more: str = "") -> Path:
    path = tmp_path / "home/ckptsync" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = f"worker: {{runs: ['{tmp_path}/out/*']}}\n" if "worker" in roles else ""
    path.write_text(f"roles: {roles}\nstore: {{url: {tmp_path}/store}}\n{runs}{more}")
    return path


Cli = Callable[..., Printed]


@pytest.fixture
def install(cli: Cli) -> Cli:
    return partial(cli, "service", "install", "-c")


@pytest.fixture
def uninstall(cli: Cli) -> Cli:
    return partial(cli, "service", "uninstall")


def states(printed: Printed) -> list[str]:
    return [file["state"] for file in printed.json["files"]]


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_the_unit_is_copied_with_the_program(config: Path, tmp_path: Path, install: Cli) -> None:
    planned = install(config, "--dry-run", "--json").json
    assert not (tmp_path / "system").exists()
    assert [file["state"] for file in planned["files"]] == ["written"]
    assert planned["next"][0].startswith(f"sudo -u {ME} ")
    assert planned["next"][0].endswith(f"doctor -c {config}")

    said = install(config, "--as", ME).out
    program = shutil.which("ckptsync", path=str(Path(sys.executable).parent))
    template = (ROOT / "systemd" / WORKER).read_text()
    lines = (tmp_path / "system" / WORKER).read_text().splitlines()
    assert lines[1:] == template.replace("/opt/ckptsync/bin/ckptsync", str(program)).splitlines()
    assert files(tmp_path / "system") == [WORKER]
    assert f"systemctl enable --now ckptsync-worker@{ME}" in said

    assert states(install(config, "--as", ME, "--json")) == ["unchanged"]
    (tmp_path / "system" / WORKER).write_text(f"{lines[0]}\nof an older version")
    assert states(install(config, "--as", ME, "--json")) == ["replaced"]


def test_what_systemctl_edit_must_add_is_named(config: Path, tmp_path: Path, install: Cli) -> None:
    written(tmp_path, ME, more="limits: {memory: 1GiB, threads: 64}\n")
    planned = install(config, "--json").json
    (note,) = planned["notes"]
    of_all = Path("/tmp")
    out = of_all if tmp_path.is_relative_to(of_all) else tmp_path / "out"
    paths = f"{out} {tmp_path}/store"
    assert f"[Unit] RequiresMountsFor={paths} [Service] ReadWritePaths={paths}" in note
    assert "MemoryMax=: 768M more than the unit has; [Service] TasksMax=512" in note
    assert f"systemctl edit ckptsync-worker@{ME}" in planned["next"]


@pytest.mark.parametrize(
    ("run", "root"),
    [
        ("/data/out/*", ""),
        ("/data/*/out", "/data"),
        ("/scratch/jobs/job[0-9]/x/out", "/scratch/jobs"),
        ("/data/special/out", "/data/special"),
        ("/home/ann/runs/*", "/home/ann/runs"),
        ("/home/ann/out", "/home/ann/out"),
        ("/tmp/ray/session_*/artifacts/*", "/tmp"),
        ("/tmp/ray/out", "/tmp"),
    ],
)
def test_what_must_be_writable(config: Path, run: str, root: str, install: Cli) -> None:
    config.write_text(f"store: {{url: s3://bucket}}\nworker: {{runs: ['{run}']}}\n")
    notes = [
        note
        for note in install(config, "--dry-run", "--json").json["notes"]
        if "systemctl" not in note
    ]
    assert [note.rpartition("=")[2] for note in notes if "ReadWritePaths" in note] == (
        [root] if root else []
    )


def test_a_worker_with_a_head_has_a_drop_in(config: Path, tmp_path: Path, install: Cli) -> None:
    drop_in = f"ckptsync-worker@{ME}.service.d/10-ckptsync.conf"
    written(tmp_path, ME, "[worker, head]")
    install(config)
    assert "MemoryMax=4G" in (tmp_path / "system" / drop_in).read_text()
    written(tmp_path, ME)
    assert states(install(config, "--json")) == ["unchanged", "removed"]
    assert drop_in not in files(tmp_path / "system")


def test_what_no_service_could_run_is_refused_before_anything_is_written(
    config: Path, tmp_path: Path, install: Cli
) -> None:
    other = tmp_path / "me.yaml"
    other.write_text(config.read_text())
    as_me, own = ("--as", ME), config.with_name("worker.yaml")
    absent = f"store: {{url: /no/such/store}}\nworker: {{runs: ['{tmp_path}/out/*']}}\n"
    for source, words, why in (
        (other, as_me, f"-c {other}: the unit reads {config}"),
        (other, ["--user"], f"the unit reads {own}"),
        (written(tmp_path, "nobody-of-that-name"), [], "there is no such user"),
        ("store: {urk: /x}\n", as_me, "unknown key"),
        (absent, as_me, "/no/such/store: does not exist"),
        ("store: {url: s3://bucket}\nworker: {runs: ['/*/out']}\n", [], "would be writable"),
        ("store: {url: s3://bucket}\nworker: {runs: ['/home/*/out']}\n", [], "would be writable"),
    ):
        if isinstance(source, str):
            config.write_text(source)
        path = config if isinstance(source, str) else source
        assert why in install(path, *words, code=2).err
    assert not (tmp_path / "system").exists()
    config.write_text(absent)
    assert "note: /no/such/store: does not exist yet" in install(config, *as_me, "--dry-run").out


def test_sudo_names_the_user_and_the_file_beside_it_the_variables(
    config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("SUDO_USER", ME)
    monkeypatch.setenv("CKPTSYNC_STORE", "/of/this/shell")
    config.with_suffix(".env").write_text("# ours\nCKPTSYNC_STORE='s3://bucket'\n")
    said = cli("service", "install").out
    assert f"systemctl enable --now ckptsync-worker@{ME}" in said
    assert "/of/this/shell" not in said


def test_a_unit_that_others_wrote_is_left_alone(config: Path, tmp_path: Path, install: Cli) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system/ckptsync-worker@.service").write_text("[Service]\nUser=mine\n")
    assert "was not written by this command" in install(config, "--as", ME, code=2).err
    assert [p.name for p in (tmp_path / "system").iterdir()] == ["ckptsync-worker@.service"]


def test_a_second_worker_needs_a_name(config: Path, tmp_path: Path, install: Cli) -> None:
    (tmp_path / "system/ckptsync-worker@ann.service.d").mkdir(parents=True)
    assert "several workers on one machine need a node name each" in install(config, "--as", ME).out


def test_a_user_s_own_unit(config: Path, tmp_path: Path, install: Cli) -> None:
    said = install(written(tmp_path, "worker"), "--user").out
    text = (tmp_path / "home/systemd/user/ckptsync-worker.service").read_text()
    assert "run -c %E/ckptsync/%j.yaml\n" in text
    assert "loginctl enable-linger" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user's home")
def test_root_writes_and_removes_nothing_in_another_users_home(
    config: Path, tmp_path: Path, install: Cli, uninstall: Cli
) -> None:
    os.chown(tmp_path / "home", 65534, 65534)
    assert "and this is root" in install(config, "--user", code=2).err
    uninstall("--user", code=2)
    assert files(tmp_path / "home") == ["ckptsync", f"ckptsync/{ME}.yaml"]


def test_a_head_runs_as_a_user_of_its_own_and_another_one_is_said_in_an_edit(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Cli
) -> None:
    head = written(tmp_path, "head", "[head]")
    assert "systemctl edit ckptsync-head" in install(head, "--as", ME, code=2).err
    monkeypatch.setattr(service, "HEAD_USER", ME)
    install(head)
    assert "User=ckptsync\n" in (tmp_path / "system/ckptsync-head.service").read_text()


def another(user: str) -> Path:
    """A second user's worker, which is enabled."""
    link = service.SYSTEM / f"multi-user.target.wants/ckptsync-worker@{user}.service"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(f"../{WORKER}")
    return link


def test_what_was_installed_is_removed_and_nothing_else(
    config: Path, tmp_path: Path, install: Cli, uninstall: Cli
) -> None:
    service.SYSTEM.mkdir()
    (service.SYSTEM / "other.service").write_text("[Unit]")
    install(config, "--as", ME)
    before = files(tmp_path)
    planned = uninstall("--as", ME, "--dry-run", "--json").json["removed"]
    assert planned == [str(service.SYSTEM / WORKER)]
    assert files(tmp_path) == before
    said = uninstall("--as", ME).out
    assert files(service.SYSTEM) == ["other.service"]
    assert {name for name in before if not name.startswith("system/ckptsync")} == set(
        files(tmp_path)
    )
    assert f"systemctl stop ckptsync-worker@{ME}" in said
    assert "holds nothing" in uninstall("--as", ME, "--json").json["notes"][0]


def test_the_template_stays_for_another_worker(config: Path, install: Cli, uninstall: Cli) -> None:
    install(config, "--as", ME)
    link = another("somebody")
    assert "ckptsync-worker@somebody still uses it" in uninstall("--as", ME).out
    assert WORKER in files(service.SYSTEM)
    link.unlink()
    uninstall("--as", "somebody")
    assert files(service.SYSTEM) == ["multi-user.target.wants"]


def test_what_the_operator_wrote_stays(config: Path, install: Cli, uninstall: Cli) -> None:
    install(config, "--as", ME)
    (service.SYSTEM / f"ckptsync-worker@{ME}.service.d").mkdir()
    (service.SYSTEM / f"ckptsync-worker@{ME}.service.d" / "override.conf").write_text("[Service]")
    (service.SYSTEM / "ckptsync-worker@.service").write_text("mine")
    kept = uninstall("--as", ME, "--json").json["kept"]
    assert [line.rpartition("/")[2] for line in kept] == [
        "ckptsync-worker@.service: was not written by this command",
        "override.conf: your own",
    ]
    assert len(files(service.SYSTEM)) == 3


def test_an_enabled_service_is_not_removed(config: Path, install: Cli, uninstall: Cli) -> None:
    install(config, "--as", ME)
    link = another(ME)
    assert f"systemctl disable --now ckptsync-worker@{ME}" in uninstall("--as", ME, code=2).err
    assert "comes first" in uninstall("--as", ME, "--dry-run").out
    assert len(files(service.SYSTEM)) == 3
    link.unlink()
    uninstall("--as", ME)


def test_head_and_a_user_s_own_units_go_by_themselves(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Cli, uninstall: Cli
) -> None:
    monkeypatch.setattr(service, "HEAD_USER", ME)
    head, own = written(tmp_path, "head", "[head]"), written(tmp_path, "worker")
    for words in ([config], [head], [own, "--user"], [head, "--user"]):
        install(*words)
    uninstall("--head")
    uninstall("--user")
    mine = tmp_path / "home" / "systemd" / "user"
    assert (files(mine), files(service.SYSTEM)) == (["ckptsync-head.service"], [WORKER])
    uninstall("--user", "--head")
    assert (files(mine), files(service.SYSTEM)) == ([], [WORKER])


@pytest.mark.parametrize("words", [[], ["--user", "--as", "x"], ["--head", "--as", "x"]])
def test_what_is_not_said_is_asked_for(config: Path, words: list[str], uninstall: Cli) -> None:
    assert "--as" in uninstall(*words, code=2).err
