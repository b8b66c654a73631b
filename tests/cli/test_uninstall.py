"""``ckptsync service uninstall``, as far as it goes without systemd (tests/nspawn has the rest)."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli import service
from ckptsync.cli.main import main
from tests.cli.test_service import config as config  # noqa: PLC0414  a fixture
from tests.cli.test_service import install

ME = getpass.getuser()


def uninstall(*words: str) -> int:
    return main(["service", "uninstall", *words])


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


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
    assert "ckptsync-worker@somebody.service is made from it, too" in capsys.readouterr().out
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
