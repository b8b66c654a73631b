"""The packages of a release, installed as users install them: `make release` builds and tests them.

Each is tried in an environment that has nothing of this repository: other directories, no
variables but those of package managers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

DIRECTORY = os.environ.get("CKPTSYNC_TEST_RELEASE", "")
pytestmark = pytest.mark.skipif(not DIRECTORY, reason="make release sets CKPTSYNC_TEST_RELEASE")
_PASSED = ("PIP_", "UV_", "SSL_", "HTTP", "http", "NO_PROXY", "no_proxy")
Installed = tuple[list[str], dict[str, str], str]
"""The words that call ckptsync, the environment, and how the program is removed again."""


def package(pattern: str) -> Path:
    (path,) = Path(DIRECTORY).absolute().glob(pattern)
    return path


def call(words: Sequence[str | Path], environment: dict[str, str]) -> str:
    """The output of a command that succeeds."""
    ended = subprocess.run(
        [*map(str, words)], check=False, env=environment, cwd="/", capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{words}: {ended.stdout}\n{ended.stderr}"
    return ended.stdout


def tool(name: str) -> str:
    """A program of the environment that runs this."""
    return str(Path(sys.executable).with_name(name))


def by_pip(home: Path, environment: dict[str, str], pattern: str) -> Installed:
    call([sys.executable, "-m", "venv", home / "venv"], environment)
    python = str(home / "venv/bin/python")
    call([python, "-m", "pip", "install", "-q", f"{package(pattern)}[s3]"], environment)
    return [str(home / "venv/bin/ckptsync")], environment, f"{python} -m pip uninstall ckptsync"


def by_wheel(home: Path, environment: dict[str, str]) -> Installed:
    return by_pip(home, environment, "*.whl")


def by_sdist(home: Path, environment: dict[str, str]) -> Installed:
    return by_pip(home, environment, "*.tar.gz")


def by_uv(home: Path, environment: dict[str, str]) -> Installed:
    where = {"UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin", "UV_CACHE_DIR": "cache"}
    environment |= {name: str(home / folder) for name, folder in where.items()}
    probe = [tool("uv"), "pip", "install", "--dry-run", "--target", str(home), "pip"]
    if b"Failed to fetch" in subprocess.run(probe, check=False, capture_output=True).stderr:
        pytest.skip("uv reaches no package index from here")
    call([tool("uv"), "tool", "install", "--python", sys.executable, package("*.whl")], environment)
    return [str(home / "bin/ckptsync")], environment, "uv tool uninstall ckptsync"


def by_pipx(home: Path, environment: dict[str, str]) -> Installed:
    environment |= {"PIPX_HOME": str(home / "pipx"), "PIPX_BIN_DIR": str(home / "bin")}
    call([tool("pipx"), "install", package("*.whl")], environment)
    return [str(home / "bin/ckptsync")], environment, "pipx uninstall ckptsync"


def as_zipapp(home: Path, environment: dict[str, str]) -> Installed:
    path = shutil.copy(package("*.pyz"), home)
    return [str(path)], environment, f"rm {path}"


@pytest.mark.parametrize("way", [by_wheel, by_sdist, by_uv, by_pipx, as_zipapp])
def test_an_installed_release_runs_the_demo_and_has_what_its_hints_name(
    way: Callable[[Path, dict[str, str]], Installed], tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    python = str(Path(sys.base_prefix) / "bin")
    environment |= {"HOME": str(tmp_path), "PATH": f"{python}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    program, environment, removal = way(tmp_path, environment)
    assert call([*program, "--version"], environment).startswith("ckptsync ")
    demo = call([*program, "demo", "--dir", tmp_path / "demo"], environment)
    assert "everything is verified once more" in demo
    assert "# Configuration" in call([*program, "help", "configuration"], environment)
    assert "store:" in call([*program, "config", "example", "worker"], environment)
    model = tmp_path / "demo/store/fsdp2/consolidated/checkpoint-4"
    assert "tensors" in call([*program, "inspect", model], environment)
    assert removal in call([*program, "uninstall", "--dry-run"], environment)


def test_the_sdist_has_what_builds_and_tests_the_release(tmp_path: Path) -> None:
    archive = package("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "systemd", "configs", "docs"):
        assert (source / "ckptsync" / name).exists() or (source / name).exists(), name
