"""``ckptsync service install`` and ``uninstall`` without systemd (tests/nspawn has the rest)."""

from __future__ import annotations

import getpass
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli import service, systemd_units
from ckptsync.cli.main import main

ME = getpass.getuser()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of runs that are there; systemd's folder is the test's own."""
    monkeypatch.setattr(service, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(systemd_units, "_EMPTIED", ())  # pytest's own folder may lie in /tmp
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SUDO_USER", raising=False)
    (tmp_path / "store").mkdir()
    (tmp_path / "out").mkdir()
    found = tmp_path / "me.yaml"
    found.write_text(f"store: {{url: {tmp_path}/store}}\nworker: {{runs: ['{tmp_path}/out/*']}}\n")
    return found


def install(config: Path, *words: str) -> int:
    return main(["service", "install", "-c", str(config), *words])


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def uninstall(*words: str) -> int:
    return main(["service", "uninstall", *words])


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_unit_and_drop_in_are_written_and_the_next_step_is_said(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config, "--as", ME, "--dry-run", "--json") == 0
    assert not (tmp_path / "system").exists()
    planned = told(capsys)
    assert "ReadWritePaths=" in planned["files"][1]["text"]
    assert planned["next"][0].startswith(f"sudo -u {ME} ")
    assert planned["next"][0].endswith(f"doctor -c {config}")

    assert install(config, "--as", ME) == 0
    dropped = (tmp_path / f"system/ckptsync-worker@{ME}.service.d/10-ckptsync.conf").read_text()
    assert f"ReadWritePaths={tmp_path}/out {tmp_path}/store\n" in dropped
    assert f"run -c {config}\n" in dropped
    assert "User=%i" in (tmp_path / "system/ckptsync-worker@.service").read_text()
    assert f"systemctl enable --now ckptsync-worker@{ME}" in capsys.readouterr().out

    install(config, "--as", ME, "--json")
    assert [file["state"] for file in told(capsys)["files"]] == ["unchanged", "unchanged"]
    config.write_text(f"store: {{url: s3://b}}\nworker: {{runs: ['{tmp_path}/out/*']}}\n")
    install(config, "--as", ME, "--json")
    assert [file["state"] for file in told(capsys)["files"]] == ["unchanged", "replaced"]


def test_a_unit_that_somebody_else_wrote_is_left_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system/ckptsync-worker@.service").write_text("[Service]\nUser=mine\n")
    assert install(config, "--as", ME) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "system").iterdir()] == ["ckptsync-worker@.service"]


def test_the_user_who_trains_must_be_known_and_there(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config) == 2
    assert "--as USER" in capsys.readouterr().err
    assert install(config, "--as", "nobody-of-that-name") == 2
    assert "there is no such user" in capsys.readouterr().err


def test_who_called_sudo_is_the_user_who_trains(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", ME)
    assert install(config) == 0
    assert (tmp_path / f"system/ckptsync-worker@{ME}.service.d").is_dir()


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
    text = told(capsys)["files"][1]["text"]
    assert "PrivateNetwork=no" in text
    assert f"EnvironmentFile=-{config.with_suffix('.env')}\n" in text


def test_a_second_worker_on_a_machine_is_told_to_take_a_name(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system/ckptsync-worker@ann.service.d").mkdir(parents=True)
    assert install(config, "--as", ME) == 0
    assert "several workers on one machine need a node name each" in capsys.readouterr().out


def test_a_user_s_own_unit_is_written_where_that_user_s_systemd_looks(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config, "--user") == 0
    text = (tmp_path / "home/systemd/user/ckptsync-worker.service").read_text()
    assert f"run -c {config}\n" in text
    assert "loginctl enable-linger" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user's home")
def test_root_writes_and_removes_nothing_in_another_users_home(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir(exist_ok=True)
    os.chown(tmp_path / "home", 65534, 65534)
    assert install(config, "--user") == 2
    assert "and this is root" in capsys.readouterr().err
    assert main(["service", "uninstall", "--user"]) == 2
    assert not list((tmp_path / "home").iterdir())


def test_a_head_runs_as_a_user_of_its_own_or_as_one_that_is_named(
    config: Path, tmp_path: Path
) -> None:
    config.write_text(f"roles: [head]\nstore: {{url: {tmp_path}/store}}\n")
    assert install(config, "--as", ME) == 0
    assert (
        f"User={ME}\nGroup={ME}\n"
        in (tmp_path / "system/ckptsync-head.service.d/10-ckptsync.conf").read_text()
    )


def another(user: str) -> Path:
    """A second user's drop-in, as install writes it."""
    mine = service.SYSTEM / f"ckptsync-worker@{ME}.service.d" / "10-ckptsync.conf"
    path = service.SYSTEM / f"ckptsync-worker@{user}.service.d" / "10-ckptsync.conf"
    path.parent.mkdir()
    path.write_text(mine.read_text())
    return path


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
    another("somebody")
    assert uninstall("--as", ME) == 0
    assert "ckptsync-worker@somebody.service still uses it" in capsys.readouterr().out
    left = [
        "ckptsync-worker@.service",
        "ckptsync-worker@somebody.service.d",
        "ckptsync-worker@somebody.service.d/10-ckptsync.conf",
    ]
    assert files(service.SYSTEM) == left
    uninstall("--as", "somebody")
    assert files(service.SYSTEM) == []


def test_the_template_stays_for_a_worker_that_is_enabled_without_a_drop_in(config: Path) -> None:
    install(config, "--as", ME)
    link = service.SYSTEM / "multi-user.target.wants" / "ckptsync-worker@somebody.service"
    link.parent.mkdir()
    link.symlink_to("../ckptsync-worker@.service")
    assert uninstall("--as", ME) == 0
    assert link.exists()


def test_what_the_operator_wrote_stays_and_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(config, "--as", ME)
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
    link = service.SYSTEM / "multi-user.target.wants" / f"ckptsync-worker@{ME}.service"
    link.parent.mkdir()
    link.symlink_to("../ckptsync-worker@.service")
    assert uninstall("--as", ME) == 2
    assert f"systemctl disable --now ckptsync-worker@{ME}" in capsys.readouterr().err
    assert uninstall("--as", ME, "--dry-run") == 0
    assert "comes first" in capsys.readouterr().out
    assert len(files(service.SYSTEM)) == 5
    link.unlink()
    assert uninstall("--as", ME) == 0


def test_head_and_a_user_s_own_units_go_by_themselves(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head.yaml"
    head.write_text(f"roles: [head]\nstore: {{url: {tmp_path}/store}}\n")
    for words in (("--as", ME), ("--user",)):
        install(config, *words)
        install(head, *words)
    assert uninstall("--head") == 0
    assert uninstall("--user") == 0
    mine = tmp_path / "home" / "systemd" / "user"
    assert (files(mine), "ckptsync-head.service" in files(service.SYSTEM)) == (
        ["ckptsync-head.service"],
        False,
    )
    assert uninstall("--user", "--head") == 0
    assert (files(mine), files(service.SYSTEM)[0]) == ([], "ckptsync-worker@.service")
    capsys.readouterr()


@pytest.mark.parametrize("words", [[], ["--user", "--as", "x"], ["--head", "--as", "x"]])
def test_what_is_not_said_is_asked_for(
    config: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert uninstall(*words) == 2
    assert "--as" in capsys.readouterr().err
