"""configs/*.yaml load as they are; docs/configuration.md has every key of the program."""

from pathlib import Path

import pytest

from ckptsync.config.loading import load
from ckptsync.config.schema import KEYS
from tests.config.configuration_page import page

ROOT = Path(__file__).parents[2]
ROLES = {
    "worker": ("worker",),
    "head": ("head", "verifier"),
    "both": ("worker", "head", "verifier"),
}


@pytest.mark.parametrize("name", ROLES)
def test_an_example_loads_and_is_short(name: str) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    assert load(path, {}).roles == ROLES[name]
    assert len(path.read_text().splitlines()) <= 12


def test_there_is_an_example_for_each_kind_of_machine() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(ROLES)


def test_the_page_of_keys_is_that_of_the_program() -> None:
    hint = "python -m tests.config.configuration_page > docs/configuration.md"
    assert (ROOT / "docs/configuration.md").read_text() == page(), hint
    assert all(key.text.endswith(".") for key in KEYS.values())
