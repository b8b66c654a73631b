"""The Containerfile, as far as that can be judged without a container engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def instructions() -> list[tuple[str, str]]:
    """Each instruction in order, with its argument."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def test_it_has_only_instructions_that_there_are_and_begins_with_a_named_version() -> None:
    known = {"FROM", "ARG", "RUN", "COPY", "ENV", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known
    bases = arguments("FROM")
    assert all(re.fullmatch(r"docker\.io/library/python:3\.\d+-\S+( AS \w+)?", b) for b in bases)
    assert len({base.partition(" AS ")[0] for base in bases}) == 1, "a venv is of one Python"


def test_it_ends_as_a_user_of_its_own_with_the_command_as_entry_point() -> None:
    user = arguments("USER")[-1]
    assert re.fullmatch(r"(\d+):\1", user), "by number: Kubernetes sees that it is not root"
    assert user.partition(":")[0] != "0"
    made = next(command for command in arguments("RUN") if "useradd" in command)
    assert f"--uid {user.partition(':')[0]} " in made
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["ckptsync"]
    assert json.loads(arguments("CMD")[0]) == ["--help"]


def test_the_extras_are_the_package_s_and_nothing_secret_is_built_in() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    default = next(argument for argument in arguments("ARG")).partition("=")[2]
    assert set(default.split(",")) <= set(project["optional-dependencies"])
    text = (ROOT / "Containerfile").read_text()
    assert not re.search(r"KEY|SECRET|TOKEN|PASSWORD", text)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*"} <= set(ignored)
