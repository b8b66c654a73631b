"""configs/*.yaml: complete, loadable, and true."""

import re
from pathlib import Path

import pytest
import yaml

from ckptsync.config.loading import load
from ckptsync.config.schema import KEYS

CONFIGS = sorted(
    p
    for p in (Path(__file__).parents[2] / "configs").glob("*.yaml")
    if not p.stem.startswith("prometheus")
)
ROLES = {
    "worker": ("worker",),
    "head": ("head", "verifier"),
    "both": ("worker", "head", "verifier"),
}


def said(text: str) -> tuple[dict[str, object], dict[str, object]]:
    """What an example sets, and what it says (in comments) the defaults are, by key."""
    active: dict[str, object] = {}
    defaults: dict[str, object] = {}
    section = ""
    for line in text.splitlines():
        found = re.fullmatch(r"( *)(# )?( *)([a-z_]+):(?: ([^#]*?))?(?:  +#.*)?", line)
        if not found:
            continue
        nested = bool(found[1] or found[3])
        if not found[5] and not nested:
            section = found[4]
            continue
        key = f"{section}.{found[4]}" if nested else found[4]
        (defaults if found[2] else active)[key] = yaml.safe_load(found[5] or "null")
    return active, defaults


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_an_example_loads_with_the_roles_of_its_name(path: Path) -> None:
    assert load(path, {}).roles == ROLES[path.stem]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_key_stands_in_every_example(path: Path) -> None:
    active, defaults = said(path.read_text())
    assert {*active, *defaults} >= set(KEYS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_defaults_in_comments_are_true(path: Path) -> None:
    _, defaults = said(path.read_text())
    wrong = {
        key: value for key, value in defaults.items() if key in KEYS and value != KEYS[key].default
    }
    assert not wrong
    assert len(set(defaults) & set(KEYS)) >= 12


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_variable_is_named_beside_its_key(path: Path) -> None:
    for key, setting in KEYS.items():
        last = key.rpartition(".")[2]
        assert not setting.variable or re.search(
            rf"^[# ]*{last}: .*# {setting.variable}\b", path.read_text(), re.MULTILINE
        )


def test_there_is_an_example_for_each_kind_of_machine() -> None:
    assert {path.stem for path in CONFIGS} == set(ROLES)
