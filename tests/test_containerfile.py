"""The Containerfile, as far as that can be judged without a container engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from ckptsync.config.loading import load

ROOT = Path(__file__).parent.parent


def instructions() -> list[tuple[str, str]]:
    """Each instruction in order, with its argument."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


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


def test_composes_services_have_configurations_that_are_valid(tmp_path: Path) -> None:
    variables = {"STORE": str(tmp_path), "OUT": str(tmp_path / "out"), "TRAINER": "1000:1000"}
    text = (ROOT / "configs/compose.yml").read_text()
    compose = yaml.safe_load(re.sub(r"\$\{(\w+)[^}]*\}", lambda m: variables[m[1]], text))
    assert {*compose["services"]} == {"worker", "head"}
    for name, service in compose["services"].items():
        (config,) = service["configs"]
        assert service["command"] == ["run", "-c", config["target"]]
        mounted = {volume.partition(":")[0] for volume in service["volumes"]}
        assert mounted <= {*variables.values()}
        file = tmp_path / f"{name}.yaml"
        file.write_text(compose["configs"][config["source"]]["content"])
        assert name in load(file, {}).roles
