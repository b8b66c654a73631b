"""``ckptsync uninstall``: what it removes, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli import service
from ckptsync.cli.main import main
from ckptsync.spool.pins import create_pin, mark_stored

Uninstall = Callable[..., Any]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A worker's unit, cache, configuration, and a spool with one save."""
    home = tmp_path / "home"
    monkeypatch.setattr(service, "SYSTEM", tmp_path / "system")
    monkeypatch.setattr(service, "CONFIGS", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "packages"))
    checkpoint = tmp_path / "out/checkpoint-1"
    config = home / "ckptsync/worker.yaml"
    line = tmp_path / "packages/ckptsync-autoload.pth"
    cached = tmp_path / "cache/ckptsync/catalogue-0"
    for path in (tmp_path / "store/x", checkpoint / "weights", config, line, cached):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    config.write_text(
        f"store: {{url: {tmp_path}/store}}\nworker: {{runs: [{{path: {tmp_path}/out}}]}}\n"
    )
    (tmp_path / "out/_ckptsync/pins").mkdir(mode=0o700, parents=True)
    (tmp_path / "out/_ckptsync").chmod(0o700)
    assert main(["service", "install", "--user"]) == 0
    return {
        "unit": home / "systemd/user/ckptsync-worker.service",
        "line": line,
        "cache": tmp_path / "cache/ckptsync",
        "config": config,
        "spool": tmp_path / "out/_ckptsync",
        "checkpoint": checkpoint,
        "store": tmp_path / "store",
    }


@pytest.fixture
def uninstall(capsys: pytest.CaptureFixture[str]) -> Uninstall:
    def call(*words: str) -> Any:
        capsys.readouterr()
        assert main(["uninstall", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def left(files: dict[str, Path]) -> list[str]:
    """The names of what is still there."""
    return [name for name, path in files.items() if path.exists()]


def test_it_removes_what_can_be_made_again(files: dict[str, Path], uninstall: Uninstall) -> None:
    expected = [str(files[name]) for name in ("unit", "line", "cache")]
    dry = uninstall("--dry-run")
    assert dry["removed"] == expected
    assert left(files) == [*files]
    assert uninstall() == {**dry, "dry_run": False}
    assert left(files) == ["config", "spool", "checkpoint", "store"]
    assert uninstall()["removed"] == []


def test_purge_leaves_checkpoints_and_store(files: dict[str, Path], uninstall: Uninstall) -> None:
    uninstall("--purge")
    assert left(files) == ["checkpoint", "store"]


def test_purge_leaves_a_save_that_is_unsent(files: dict[str, Path], uninstall: Uninstall) -> None:
    pin = create_pin(files["checkpoint"].parent, "checkpoint-1", 0, "n0")
    assert pin
    assert uninstall("--purge")["kept"] == [
        f"{files['config']}: a spool that stays needs it",
        (
            f"{files['spool']}: 1 saves in it may not be stored yet: ckptsync drain"
            f" {files['checkpoint'].parent} -c {files['config']}"
        ),
    ]
    mark_stored(pin)
    uninstall("--purge")
    assert left(files) == ["checkpoint", "store"]


def test_an_enabled_service_is_named_first(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wants = files["unit"].parent / "default.target.wants"
    wants.mkdir()
    (wants / files["unit"].name).symlink_to(files["unit"])
    assert main(["uninstall"]) == 2
    assert "systemctl --user disable --now ckptsync-worker" in capsys.readouterr().err
    assert left(files) == [*files]


def test_a_broken_configuration_stays(files: dict[str, Path], uninstall: Uninstall) -> None:
    files["config"].write_text("store: 5\n")
    uninstall("--purge")
    assert left(files) == ["config", "spool", "checkpoint", "store"]


def test_a_cache_directory_that_others_use_stays(
    files: dict[str, Path], uninstall: Uninstall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "shared"))
    uninstall("--purge")
    assert (tmp_path / "shared").is_dir()
    assert left(files) == ["cache", "checkpoint", "store"]
