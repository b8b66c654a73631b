from __future__ import annotations

import pytest

from ckptsync.cli.arguments import parser
from ckptsync.cli.arguments_keeping import RULES
from ckptsync.config.readers_head import RULES as KEYS


def test_every_rule_of_a_configuration_has_a_flag() -> None:
    assert {name.replace("-", "_") for name, _, _ in RULES} == set(KEYS)


@pytest.mark.parametrize("line", ["gc", "gc /store --keep-last 3 --dry-run", "keep a/b --release", "repair /store a/b --wait"])
def test_a_command_names_its_module(line: str) -> None:
    assert parser().parse_args(line.split()).command == f"ckptsync.cli.{line.split(maxsplit=1)[0]}"
