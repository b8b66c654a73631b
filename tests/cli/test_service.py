"""``ckptsync service install`` and ``uninstall`` without systemd (tests/nspawn has the rest)."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli import service
from ckptsync.cli.main import main
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


def install(config: Path, *words: str) -> int:
    return main(["service", "install", "-c", str(config), *words])


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def uninstall(*words: str) -> int:
    return main(["service", "uninstall", *words])


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_the_unit_is_copied_with_the_path_of_the_program_and_the_next_steps_are_said(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config, "--dry-run", "--json") == 0
    assert not (tmp_path / "system").exists()
    planned = told(capsys)
    assert [file["state"] for file in planned["files"]] == ["written"]
    assert planned["next"][0].startswith(f"sudo -u {ME} ")
    assert planned["next"][0].endswith(f"doctor -c {config}")

    assert install(config, "--as", ME) == 0
    program = shutil.which("ckptsync", path=str(Path(sys.executable).parent))
    template = (ROOT / "systemd" / WORKER).read_text()
    lines = (tmp_path / "system" / WORKER).read_text().splitlines()
    assert lines[1:] == template.replace("/opt/ckptsync/bin/ckptsync", str(program)).splitlines()
    assert files(tmp_path / "system") == [WORKER]
    assert f"systemctl enable --now ckptsync-worker@{ME}" in capsys.readouterr().out

    install(config, "--as", ME, "--json")
    assert [file["state"] for file in told(capsys)["files"]] == ["unchanged"]
    (tmp_path / "system" / WORKER).write_text(f"{lines[0]}\nof an older version")
    install(config, "--as", ME, "--json")
    assert [file["state"] for file in told(capsys)["files"]] == ["replaced"]


def test_what_a_configuration_needs_beyond_the_unit_is_named_for_systemctl_edit(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, ME, more="limits: {memory: 1GiB, threads: 64}\n")
    install(config, "--json")
    planned = told(capsys)
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
def test_what_holds_an_output_directory_is_to_be_writable_so_that_it_may_come_and_go(
    config: Path, run: str, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"store: {{url: s3://bucket}}\nworker: {{runs: ['{run}']}}\n")
    assert install(config, "--dry-run", "--json") == 0
    notes = [note for note in told(capsys)["notes"] if "systemctl" not in note]
    assert [note.rpartition("=")[2] for note in notes if "ReadWritePaths" in note] == (
        [root] if root else []
    )


@pytest.mark.parametrize("run", ["/*/out", "/home/*/out"])
def test_nobody_s_whole_home_and_no_whole_system_is_to_be_writable(
    config: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"store: {{url: s3://bucket}}\nworker: {{runs: ['{run}']}}\n")
    assert install(config) == 2
    assert "would be writable" in capsys.readouterr().err


def test_a_worker_with_a_head_has_a_drop_in_as_long_as_it_has_the_head(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_in = f"ckptsync-worker@{ME}.service.d/10-ckptsync.conf"
    written(tmp_path, ME, "[worker, head]")
    assert install(config) == 0
    assert "MemoryMax=4G" in (tmp_path / "system" / drop_in).read_text()
    written(tmp_path, ME)
    capsys.readouterr()
    assert install(config, "--json") == 0
    assert [file["state"] for file in told(capsys)["files"]] == ["unchanged", "removed"]
    assert drop_in not in files(tmp_path / "system")


def test_a_unit_that_somebody_else_wrote_is_left_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system/ckptsync-worker@.service").write_text("[Service]\nUser=mine\n")
    assert install(config, "--as", ME) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "system").iterdir()] == ["ckptsync-worker@.service"]


def test_the_user_who_trains_must_be_there(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(written(tmp_path, "nobody-of-that-name")) == 2
    assert "there is no such user" in capsys.readouterr().err


def test_a_configuration_that_no_unit_reads_is_refused_with_the_path_that_it_reads(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "me.yaml"
    other.write_text(config.read_text())
    for words in ((), ("--user",)):
        assert install(other, "--as", ME, *words) == 2 or words
    assert f"-c {other}: the unit reads {config}" in capsys.readouterr().err
    assert install(other, "--user") == 2
    assert f"the unit reads {config.with_name('worker.yaml')}" in capsys.readouterr().err
    assert not (tmp_path / "system").exists()


def test_who_called_sudo_is_the_user_who_trains(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SUDO_USER", ME)
    assert main(["service", "install"]) == 0
    assert f"systemctl enable --now ckptsync-worker@{ME}" in capsys.readouterr().out


def test_a_directory_that_is_not_there_is_refused_since_no_service_could_be_given_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f"store: {{url: /no/such/store}}\nworker: {{runs: ['{tmp_path}/out/*']}}\n")
    assert install(config, "--as", ME) == 2
    assert "/no/such/store: does not exist" in capsys.readouterr().err
    assert install(config, "--as", ME, "--dry-run") == 0
    assert "note: /no/such/store: does not exist yet" in capsys.readouterr().out


def test_a_wrong_configuration_is_refused_before_anything_is_written(
    config: Path, tmp_path: Path
) -> None:
    config.write_text("store: {urk: /x}\n")
    assert install(config, "--as", ME) == 2
    assert not (tmp_path / "system").exists()


def test_variables_of_the_file_beside_it_count_those_of_this_shell_do_not(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTSYNC_STORE", "/of/this/shell")
    config.with_suffix(".env").write_text("# ours\nCKPTSYNC_STORE='s3://bucket'\n")
    install(config, "--as", ME, "--dry-run", "--json")
    assert "/of/this/shell" not in str(told(capsys))


def test_a_second_worker_on_a_machine_is_told_to_take_a_name(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system/ckptsync-worker@ann.service.d").mkdir(parents=True)
    assert install(config, "--as", ME) == 0
    assert "several workers on one machine need a node name each" in capsys.readouterr().out


def test_a_user_s_own_unit_is_written_where_that_user_s_systemd_looks(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(written(tmp_path, "worker"), "--user") == 0
    text = (tmp_path / "home/systemd/user/ckptsync-worker.service").read_text()
    assert "run -c %E/ckptsync/%j.yaml\n" in text
    assert "loginctl enable-linger" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user's home")
def test_root_writes_and_removes_nothing_in_another_users_home(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.chown(tmp_path / "home", 65534, 65534)
    assert install(config, "--user") == 2
    assert "and this is root" in capsys.readouterr().err
    assert main(["service", "uninstall", "--user"]) == 2
    assert files(tmp_path / "home") == ["ckptsync", f"ckptsync/{ME}.yaml"]


def test_a_head_runs_as_a_user_of_its_own_and_another_one_is_said_in_an_edit(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = written(tmp_path, "head", "[head]")
    assert install(head, "--as", ME) == 2
    assert "systemctl edit ckptsync-head" in capsys.readouterr().err
    monkeypatch.setattr(service, "HEAD_USER", ME)
    assert install(head) == 0
    assert "User=ckptsync\n" in (tmp_path / "system/ckptsync-head.service").read_text()


def another(user: str) -> Path:
    """A second user's worker, which is enabled."""
    link = service.SYSTEM / f"multi-user.target.wants/ckptsync-worker@{user}.service"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(f"../{WORKER}")
    return link


def test_what_was_installed_is_removed_and_nothing_else(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.SYSTEM.mkdir()
    (service.SYSTEM / "other.service").write_text("[Unit]")
    install(config, "--as", ME)
    before = files(tmp_path)
    assert uninstall("--as", ME) == 0
    assert files(service.SYSTEM) == ["other.service"]
    assert {name for name in before if not name.startswith("system/ckptsync")} == set(
        files(tmp_path)
    )
    assert f"systemctl stop ckptsync-worker@{ME}" in capsys.readouterr().out
    assert uninstall("--as", ME, "--json") == 0
    assert "holds nothing" in told(capsys)["notes"][0]


def test_a_dry_run_removes_nothing_and_names_the_same(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(config, "--as", ME)
    before = files(service.SYSTEM)
    capsys.readouterr()
    uninstall("--as", ME, "--dry-run", "--json")
    planned = told(capsys)
    assert files(service.SYSTEM) == before
    uninstall("--as", ME, "--json")
    assert told(capsys)["removed"] == planned["removed"] != []


def test_the_template_stays_for_another_user_s_worker(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(config, "--as", ME)
    link = another("somebody")
    assert uninstall("--as", ME) == 0
    assert "ckptsync-worker@somebody still uses it" in capsys.readouterr().out
    assert WORKER in files(service.SYSTEM)
    link.unlink()
    uninstall("--as", "somebody")
    assert files(service.SYSTEM) == ["multi-user.target.wants"]


def test_what_the_operator_wrote_stays_and_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(config, "--as", ME)
    (service.SYSTEM / f"ckptsync-worker@{ME}.service.d").mkdir()
    (service.SYSTEM / f"ckptsync-worker@{ME}.service.d" / "override.conf").write_text("[Service]")
    (service.SYSTEM / "ckptsync-worker@.service").write_text("mine")
    capsys.readouterr()
    uninstall("--as", ME, "--json")
    kept = told(capsys)["kept"]
    assert [line.rpartition("/")[2] for line in kept] == [
        "ckptsync-worker@.service: was not written by this command",
        "override.conf: your own",
    ]
    assert len(files(service.SYSTEM)) == 3


def test_a_service_that_is_enabled_is_not_taken_from_under_systemd(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(config, "--as", ME)
    link = another(ME)
    assert uninstall("--as", ME) == 2
    assert f"systemctl disable --now ckptsync-worker@{ME}" in capsys.readouterr().err
    assert uninstall("--as", ME, "--dry-run") == 0
    assert "comes first" in capsys.readouterr().out
    assert len(files(service.SYSTEM)) == 3
    link.unlink()
    assert uninstall("--as", ME) == 0


def test_head_and_a_user_s_own_units_go_by_themselves(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HEAD_USER", ME)
    head, own = written(tmp_path, "head", "[head]"), written(tmp_path, "worker")
    assert [install(config), install(head), install(own, "--user"), install(head, "--user")] == (
        [0, 0, 0, 0]
    )
    assert uninstall("--head") == 0
    assert uninstall("--user") == 0
    mine = tmp_path / "home" / "systemd" / "user"
    assert (files(mine), files(service.SYSTEM)) == (["ckptsync-head.service"], [WORKER])
    assert uninstall("--user", "--head") == 0
    assert (files(mine), files(service.SYSTEM)) == ([], [WORKER])


@pytest.mark.parametrize("words", [[], ["--user", "--as", "x"], ["--head", "--as", "x"]])
def test_what_is_not_said_is_asked_for(
    config: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert uninstall(*words) == 2
    assert "--as" in capsys.readouterr().err
