"""``ckptsync hook install`` and ``uninstall``: the line beside a Python's packages, and what is
said of it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from tests.hooks.test_autoload import APPENDED, PACKAGES, Environment
from tests.support.command_line import Cli
from tests.support.refused_commands import refused
from tests.support.stand_in_programs import ROOT, STAND_IN


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment", ROOT, STAND_IN, *PACKAGES)


def line(environment: Environment) -> Path:
    return environment.site / "ckptsync-autoload.pth"


def trainers(environment: Environment) -> list[str]:
    return environment.ran("-c", APPENDED, CKPTSYNC_AUTOLOAD="1").stdout.split()


def test_it_is_installed_and_removed_once(environment: Environment, cli: Cli) -> None:
    assert trainers(environment) == ["Flow"]
    path, named = str(line(environment)), ("--python", environment.python, "--json")
    removals: dict[str, object] = {"python": environment.python, "kept": [], "next": []}
    removals |= {"format": 1, "exit_code": 0}
    nothing = [f"{environment.site}: holds no ckptsync-autoload.pth"]
    for words, is_dry, removed in (
        (["--dry-run"], True, []),
        (["--dry-run"], True, [path]),
        ([], False, [path]),
        ([], False, []),
    ):
        if removed:
            cli("hook", "install", *named)
        printed = cli("hook", "uninstall", *named, *words).json
        notes = [] if removed else nothing
        assert printed == removals | {"dry_run": is_dry, "removed": removed, "notes": notes}
    assert trainers(environment) == ["Flow"]
    for words, state in ((["--dry-run"], "installed"), ([], "installed"), ([], "unchanged")):
        told = cli("hook", "install", *named, *words).json
        is_dry = bool(words)
        done = {"format": 1, "exit_code": 0, "python": environment.python, "path": path}
        assert told == done | {"state": state, "dry_run": is_dry}
        assert trainers(environment) == (["Flow"] if is_dry else ["Flow", "DefaultCallback"])
    line(environment).unlink()
    said = cli("hook", "install", "--python", environment.python).out
    assert f"{path}: installed\n" in said


def test_a_line_that_says_something_else_is_replaced(environment: Environment, cli: Cli) -> None:
    line(environment).write_text("import os\n")
    assert "autoload.pth: replaced\n" in cli("hook", "install", "--python", environment.python).out
    assert trainers(environment) == ["Flow", "DefaultCallback"]
    assert [path.name for path in environment.site.glob(".*")] == []


def test_without_a_python_named_it_is_for_the_running_one(environment: Environment) -> None:
    done = environment.ran("-m", "ckptsync", "hook", "install")
    assert (done.returncode, done.stderr) == (0, "")
    assert trainers(environment) == ["Flow", "DefaultCallback"]
    assert environment.ran("-m", "ckptsync", "hook", "uninstall").returncode == 0
    assert not line(environment).exists()


@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_a_python_of_others_is_refused(action: str, environment: Environment, cli: Cli) -> None:
    site, words = environment.site, ("--python", environment.python)
    if action == "uninstall":
        cli("hook", "install", *words)
    site.chmod(0o555)
    try:
        said = refused("hook", action, *words, code=2, names=[site], within=100)
    finally:
        site.chmod(0o755)
    assert "--python" in said
    assert line(environment).exists() == (action == "uninstall")


def test_a_python_without_ckptsync_and_no_python_are_refused(tmp_path: Path, cli: Cli) -> None:
    bare = Environment(tmp_path / "bare")
    assert (
        f"hint: {bare.python} -m pip install "
        in cli("hook", "install", "--python", bare.python, code=2).err
    )
    assert not line(bare).exists()
    for python in ("/bin/true", "/no/such/python", str(tmp_path)):
        assert python in cli("hook", "install", "--python", python, code=2).err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users' files")
@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_root_runs_no_python_that_another_user_may_change(action: str, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    python.chmod(0o755)
    os.chown(python, 65534, 65534)
    said = refused("hook", action, "--python", python, code=2, names=["root does not run it"])
    assert "sudo -u USER" in said
    assert not (tmp_path / "ran").exists()


def test_a_draft_goes_through_no_link(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    """Whoever may write beside the packages can guess names, and put links there."""
    (tmp_path / "theirs").write_text("as it was")
    for guess in (os.getpid(), "guessed"):
        (environment.site / f".ckptsync-autoload.pth.{guess}").symlink_to(tmp_path / "theirs")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    assert main(["hook", "install", "--python", environment.python]) != 0
    assert (tmp_path / "theirs").read_text() == "as it was"
    assert not line(environment).exists()
    monkeypatch.undo()
    line(environment).symlink_to(tmp_path / "theirs")
    cli("hook", "install", "--python", environment.python)
    assert (tmp_path / "theirs").read_text() == "as it was"
    assert not line(environment).is_symlink()


def test_the_action_s_former_name_is_refused_with_the_new_one() -> None:
    said = refused("hook", "remove", "--python", "/x", code=2, names=["hook remove"])
    assert "ckptsync hook uninstall" in said
