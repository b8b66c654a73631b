"""configs/*.yaml: complete, loadable, and true."""

import re
from pathlib import Path

import pytest
import yaml

from ckptsync.config.loading import load
from ckptsync.config.schema import KEYS

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
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
def test_an_example_loads_and_has_every_key_with_its_default_and_its_variable(path: Path) -> None:
    assert load(path, {}).roles == ROLES[path.stem]
    text = path.read_text()
    active, defaults = said(text)
    assert {*active, *defaults} >= set(KEYS)
    told = {key: value for key, value in defaults.items() if key in KEYS}
    assert told == {key: KEYS[key].default for key in told}
    assert len(told) >= 12
    for key, setting in KEYS.items():
        beside = rf"^[# ]*{key.rpartition('.')[2]}: .*# {setting.variable}\b"
        assert not setting.variable or re.search(beside, text, re.MULTILINE), key


def test_there_is_an_example_for_each_kind_of_machine() -> None:
    assert {path.stem for path in CONFIGS} == set(ROLES)
