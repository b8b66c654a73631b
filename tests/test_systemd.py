from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
UNITS = sorted((ROOT / "systemd").glob("*.service"))
each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.stem)
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)


def settings(unit: Path) -> dict[str, list[str]]:
    """``Section.Key`` → its values in order."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def role_of(unit: Path) -> str:
    return unit.stem.removeprefix("ckptsync-").removesuffix("@")


def shipped(unit: Path) -> Any:
    """The example of a configuration for a unit."""
    return yaml.safe_load((ROOT / "configs" / f"{role_of(unit)}.yaml").read_text())


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


def test_there_is_a_unit_for_each_kind_of_machine() -> None:
    assert [u.name for u in UNITS] == ["ckptsync-head.service", "ckptsync-worker@.service"]


@each_unit
def test_a_unit_runs_the_daemon_with_a_configuration_that_is_shipped(unit: Path) -> None:
    command = settings(unit)["Service.ExecStart"][0].split()
    assert command[0].startswith("/")
    assert command[1:3] == ["run", "-c"]
    assert shipped(unit)["roles"][0] == role_of(unit)


@each_unit
def test_a_unit_may_write_to_what_the_shipped_configuration_names(unit: Path) -> None:
    told = settings(unit)
    config = shipped(unit)
    needed = [config["store"]["url"]]
    if "worker" in config["roles"]:
        needed += [run["path"].removesuffix("/*") for run in config["worker"]["runs"]]
    assert {f"-{path}" for path in needed} == set(told["Service.ReadWritePaths"][0].split())
    assert set(needed) == set(told["Unit.RequiresMountsFor"][0].split())


@each_unit
def test_a_unit_says_what_the_daemon_relies_on(unit: Path) -> None:
    told = settings(unit)
    assert told["Service.Type"] == ["notify"]
    assert told["Service.WatchdogSec"] == ["110"]
    assert told["Service.Restart"] == ["always"], "a reload ends it with exit code 0"
    assert float(told["Service.RestartSec"][0]) > 10 / 5, (
        "systemd gives up after five starts in 10 s"
    )
    assert told["Service.RestartPreventExitStatus"] == ["2"], (
        "a wrong configuration, or a second worker"
    )
    assert {"network-online.target", "remote-fs.target"} <= set(told["Unit.After"][0].split())
    assert told["Service.KillMode"] == ["mixed"], (
        "an ssh that carries transfers gets no signal of its own"
    )
    assert told["Service.ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(told["Service.TimeoutStopSec"][0]) > 10, "running writes have a few seconds to end"


@each_unit
def test_a_unit_steps_back_behind_training(unit: Path) -> None:
    told = settings(unit)
    assert int(told["Service.Nice"][0]) > 0
    assert int(told["Service.CPUWeight"][0]) < 100
    assert int(told["Service.IOWeight"][0]) < 100
    assert int(told["Service.OOMScoreAdjust"][0]) > 0
    assert "Service.MemoryMax" in told


def test_the_worker_is_held_to_a_gigabyte_and_leaves_what_is_the_trainings_alone() -> None:
    told = settings(ROOT / "systemd/ckptsync-worker@.service")
    assert (told["Service.MemoryMax"], told["Service.User"]) == (["1G"], ["%i"])
    assert told["Service.RemoveIPC"] == ["no"], "shared memory of the same user"
    assert told["Service.PrivateTmp"] == ["no"], "Ray's sessions are in /tmp"


@needs_systemd
@each_unit
def test_systemd_understands_a_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(
        re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
    )
    done = analyze("verify", "--recursive-errors=no", str(copy))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_systemd_understands_a_user_s_unit_and_a_drop_in(tmp_path: Path) -> None:
    unit = tmp_path / "ckptsync-worker.service"
    text = (ROOT / "systemd/user/ckptsync.service").read_text()
    unit.write_text(text.replace("/opt/ckptsync/bin/ckptsync", "/bin/true"))
    shutil.copy(ROOT / "systemd/ckptsync-worker@.service", tmp_path / "both@.service")
    (tmp_path / "both@.service.d").mkdir()
    shutil.copy(ROOT / "systemd/with-head.conf", tmp_path / "both@.service.d")
    template = tmp_path / "both@.service"
    template.write_text(template.read_text().replace("/opt/ckptsync/bin/ckptsync", "/bin/true"))
    for path in (unit, template):
        done = analyze("verify", "--recursive-errors=no", str(path))
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_user_s_own_unit_asks_for_nothing_that_only_root_has() -> None:
    told = settings(ROOT / "systemd/user/ckptsync.service")
    of_root = ("User", "Protect", "Private", "Capability", "LoadCredential", "StateDirectory")
    assert not [key for key in told if key.removeprefix("Service.").startswith(of_root)]


@needs_systemd
@each_unit
def test_a_unit_is_shut_in_well(unit: Path) -> None:
    done = analyze("security", "--offline=true", "--threshold=20", str(unit))
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r"exposure level .*: ([\d.]+)", done.stdout)[0]) <= 2.0


def test_the_units_travel_with_the_package() -> None:
    packaged = {p.relative_to(ROOT / "systemd") for p in (ROOT / "systemd").rglob("*.*")}
    assert packaged == {p.relative_to(ROOT / "ckptsync/systemd") for p in _matched()}


def _matched() -> list[Path]:
    """The files of ``systemd/`` that the patterns of the package's data name."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    data = next(line for line in lines if line.startswith('"ckptsync" = '))
    patterns = re.findall(r'"(systemd/[^"]*)"', data)
    return [path for pattern in patterns for path in (ROOT / "ckptsync").glob(pattern)]
