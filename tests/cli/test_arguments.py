"""Each command's arguments, and what the parser refuses."""

from pathlib import Path

import pytest

from ckptsync.cli.main import parser
from ckptsync.config.value_parsers import RULES as KEYS
from ckptsync.stores.opening import create_store
from tests.support.command_line import Cli


def parsed(line: str) -> dict[str, object]:
    words = line.split()
    return vars(parser(words[0]).parse_args(words[1:]))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("merge a b out", {"sources": ["a", "b"], "destination": "out", "dtype": "auto"}),
        (
            "merge a b --into c out",
            {"sources": ["a", "b"], "into": "c", "destination": "out"},
        ),
        ("merge a --dtype bf16 b out", {"sources": ["a", "b"], "destination": "out"}),
        (
            "push d --run a e --store s3://b/c --send weights",
            {"directories": ["d", "e"], "url": "s3://b/c", "run": "a", "send": "weights"},
        ),
        ("verify a --json b", {"targets": ["a", "b"], "level": None, "json": True}),
        ("config --json example", {"name": "", "json": True}),
        ("config example worker --json", {"name": "worker", "json": True}),
        (
            "resume out --wait 1m -- run --wait 2m",
            {"wait": "1m", "training": ["run", "--wait", "2m"]},
        ),
    ],
)
def test_options_may_stand_between_words(line: str, expected: dict[str, object]) -> None:
    args = parsed(line)
    assert {key: args[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("gc st", "ckptsync gc --store st"),
        ("gc sft", "one run is --run sft"),
        ("keep st sft/final", "ckptsync keep sft/final --store st"),
        ("pull st sft out", "--store URL names the store"),
        ("help exit-cods", "did you mean exit-codes?"),
    ],
)
def test_an_old_form_or_a_typo_is_told_the_new_one(
    line: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPTSYNC_STORE", raising=False)
    create_store("st")
    assert hint in cli(*line.split(), code=2).err


def test_every_rule_of_a_configuration_has_a_flag() -> None:
    assert set(KEYS) <= set(parsed("gc"))
