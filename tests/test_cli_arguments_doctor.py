from __future__ import annotations

import pytest

from ckptsync.cli.arguments import parser


@pytest.mark.parametrize(
    "line",
    ["doctor", "doctor /store --json", "doctor --publish -c x.yaml --output-dir /a --output-dir /b", "doctor --strict /store"],
)
def test_the_command_names_its_module(line: str) -> None:
    args = parser().parse_args(line.split())
    assert args.command == "ckptsync.cli.doctor"
    assert args.url == ("/store" if "/store" in line else None)


def test_nothing_is_asked_that_was_not_given() -> None:
    args = parser().parse_args(["doctor"])
    assert (args.output_dir, args.python, args.node, args.model, args.publish, args.nodes) == ([], "", "", "", False, False)
