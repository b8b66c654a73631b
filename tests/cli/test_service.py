"""``ckptsync service install``, as far as it goes without systemd (tests/nspawn has the rest)."""

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


def test_unit_and_drop_in_are_written_and_the_next_step_is_said(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config, "--as", ME) == 0
    dropped = (tmp_path / f"system/ckptsync-worker@{ME}.service.d/10-ckptsync.conf").read_text()
    assert f"ReadWritePaths={tmp_path}/out {tmp_path}/store\n" in dropped
    assert f"run -c {config}\n" in dropped
    assert "User=%i" in (tmp_path / "system/ckptsync-worker@.service").read_text()
    assert f"systemctl enable --now ckptsync-worker@{ME}" in capsys.readouterr().out


def test_a_second_time_changes_nothing_and_a_changed_configuration_replaces_the_drop_in(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(config, "--as", ME)
    capsys.readouterr()
    install(config, "--as", ME, "--json")
    assert [file["state"] for file in told(capsys)["files"]] == ["unchanged", "unchanged"]
    config.write_text(f"store: {{url: s3://b}}\nworker: {{runs: ['{tmp_path}/out/*']}}\n")
    install(config, "--as", ME, "--json")
    assert [file["state"] for file in told(capsys)["files"]] == ["unchanged", "replaced"]


def test_a_dry_run_writes_nothing_and_shows_everything(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config, "--as", ME, "--dry-run", "--json") == 0
    assert not (tmp_path / "system").exists()
    assert "ReadWritePaths=" in told(capsys)["files"][1]["text"]


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


def test_the_next_step_is_to_let_doctor_try_it_as_that_user(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(config, "--as", ME, "--json") == 0
    first = told(capsys)["next"][0]
    assert first.startswith(f"sudo -u {ME} ")
    assert first.endswith(f"doctor -c {config}")


def test_a_second_worker_on_a_machine_is_told_to_take_a_name(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system/ckptsync-worker@ann.service.d").mkdir(parents=True)
    assert install(config, "--as", ME) == 0
    assert "several workers on one machine need a node's name each" in capsys.readouterr().out


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
